"""Benchmarks of attnzoo, run from the checkout: ``python -m benchmarks --help``."""
