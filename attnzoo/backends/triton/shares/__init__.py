"""Kernels for the form `Shares`."""
