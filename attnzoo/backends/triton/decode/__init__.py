"""Pairwise attention of few queries over many keys in Triton, without gradients."""
