"""The compile gate and the tuning of the Triton kernels."""
