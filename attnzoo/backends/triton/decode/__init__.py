"""Pairwise attention of few queries in Triton, without gradients."""
