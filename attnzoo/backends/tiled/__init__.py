"""Any variant, block by block in PyTorch: memory linear in N, on any device."""
