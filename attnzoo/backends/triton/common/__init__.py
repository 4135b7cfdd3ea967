"""What all Triton kernels share: tiles, the fold, activations, configurations, launches."""
