"""Shared by all Triton kernels: tiles, loop over keys, activations, configurations, launches."""
