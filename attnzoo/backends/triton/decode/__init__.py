"""Pairwise forms for a few queries against many keys, without gradients."""
