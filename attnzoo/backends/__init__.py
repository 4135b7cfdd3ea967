"""All backends. A backend is a module or package that computes some of the forms of variants.

The kinds of form are "pairwise", "linear", "shares" and "definition"; see `attnzoo.core.forms`.

To add a backend, write a module that defines ``BACKEND``, list it here, and place it in the order
of preference in ``selection``.
"""

from attnzoo.backends import eager, linear, sdpa
from attnzoo.backends.base import Backend
from attnzoo.backends.tiled import backend as tiled
from attnzoo.backends.triton.decode import backend as decode
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.backends.triton.linear import backend as flash_linear
from attnzoo.backends.triton.shares import backend as flash_shares

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        sdpa.BACKEND,
        decode.BACKEND,
        flash.BACKEND,
        flash_linear.BACKEND,
        flash_shares.BACKEND,
        linear.BACKEND,
        tiled.BACKEND,
        eager.BACKEND,
    )
}
