"""Linear forms in Triton, chunk by chunk, forward and backward."""
