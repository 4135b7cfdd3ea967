"""Pairwise forms, forward and backward."""
