"""Runs any variant on any device, block by block in PyTorch, with memory linear in N."""
