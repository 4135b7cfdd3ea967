"""The Triton backends. Each has a folder with its kernels, launches and operators.

Importing this package does not import Triton. Triton is imported when it is first needed.

Conventions for kernel arguments: a per-query vector is an fp32 pointer to one number per (batch,
head, query), contiguous. A pointer, stride or bound that is None is a compile-time constant, so the
code for it is not compiled.
"""
