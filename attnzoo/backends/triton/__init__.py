"""The backends in Triton. One folder per operator, with its kernels, launches and operators.

Importing this package does not import Triton. The first launch of a kernel does.

Conventions for kernel arguments: a per-query vector is an fp32 pointer to one number per (batch,
head, query), contiguous. A pointer, stride or bound that is None is a compile-time constant, so the
code for it is not compiled.
"""
