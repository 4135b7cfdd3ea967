"""How a form is computed: one file or folder per backend, all listed here.

A new backend is a file with a ``BACKEND``, a place in this list, and one in the order of
preference, which is in ``selection``.
"""

from attnzoo.backends import eager, linear, sdpa
from attnzoo.backends.base import Backend
from attnzoo.backends.tiled import backend as tiled
from attnzoo.backends.triton.decode import backend as decode
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.backends.triton.linear import backend as flash_linear

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        sdpa.BACKEND,
        decode.BACKEND,
        flash.BACKEND,
        flash_linear.BACKEND,
        linear.BACKEND,
        tiled.BACKEND,
        eager.BACKEND,
    )
}
