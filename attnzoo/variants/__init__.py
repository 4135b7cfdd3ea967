"""The zoo: one file per variant, named as the variant, holding one ``VARIANT``.

A new file here is found and registered by being here.
"""

from importlib import import_module
from pkgutil import iter_modules

from attnzoo.core.registry import register_variant

for _module in iter_modules(__path__):
    register_variant(import_module(f"{__name__}.{_module.name}").VARIANT)
