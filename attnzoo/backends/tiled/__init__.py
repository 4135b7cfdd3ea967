"""The backend for any variant on any device: PyTorch, block by block, with memory linear in N."""
