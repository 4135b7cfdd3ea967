"""Measurements on pretrained models."""
