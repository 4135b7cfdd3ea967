"""The backends in Triton: kernels, launches and operators side by side, one folder per operator.

Nothing here imports Triton before a kernel is launched.

Two names of a kernel's arguments recur. A *row* is an fp32 pointer to one number per (batch, head,
query), contiguous. A pointer, stride or bound that is None is a constant of the compilation: the
code it would need is not there.
"""
