"""Experiments with output layers on the digits of scikit-learn: 1797 images of 8 × 8 pixels."""
