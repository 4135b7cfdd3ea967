"""Pairwise forms in Triton, forward and backward."""
