"""Code shared by all Triton kernels: tiles, loop over keys, activations, block sizes."""
