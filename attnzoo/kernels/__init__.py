"""The Triton kernels, one template per direction; nothing here is imported before it is launched.

``tile`` holds what they share, ``activations`` the twins of `attnzoo.activations`, ``configs`` the
table of block sizes. `attnzoo.backends.flash` launches them.

Two names of a kernel's arguments recur. A *row* is an fp32 pointer to one number per (batch, head,
query), contiguous. A pointer, stride or bound that is None is a constant of the compilation: the
code it would need is not there.
"""
