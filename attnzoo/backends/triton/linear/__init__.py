"""Linear forms, chunk by chunk, forward and backward."""
