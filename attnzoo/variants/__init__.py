"""The shipped variants. Each file has the name of its variant and defines ``VARIANT``.

Every file in this folder is imported and its variant registered.
"""

from importlib import import_module
from pkgutil import iter_modules

from attnzoo.core.registry import register_variant

for _module in iter_modules(__path__):
    register_variant(import_module(f"{__name__}.{_module.name}").VARIANT)
