"""Commands that compile and check the Triton kernels without a GPU, and that tune them."""
