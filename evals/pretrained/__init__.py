"""Pretrained models."""
