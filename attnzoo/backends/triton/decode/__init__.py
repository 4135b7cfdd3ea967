"""Pairwise forms for a few query rows against many keys, without gradients."""
