"""Plugins: Python files that register variants, each imported once under its own name."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from types import ModuleType

from attnzoo.core.checks import shown
from attnzoo.core.registry import list_variants, remove_variants


@dataclass(frozen=True)
class Plugin:
    """A file loaded by `load_plugin`.

    Attributes:
        file: Its absolute path.
        module: Its module.
        variants: The names of the variants that it registered.
    """

    file: Path
    module: ModuleType
    variants: tuple[str, ...]


_LOADED: dict[str, Plugin] = {}  # keyed by module name


def load_plugin(path: str | os.PathLike[str]) -> Plugin:
    """Import a Python file from any folder, so that its variants are registered.

    The module has the name of the file, also in ``sys.modules``. An activation in ``cube.py``
    therefore names its Triton implementation "cube:function", wherever the file is. A file that is
    loaded already is not executed again.

    Args:
        path: The file. Its folder is not added to ``sys.path``.

    Returns:
        The `Plugin`.

    Raises:
        TypeError: The path is not a path.
        ValueError: There is no such file, its module name is taken, or it raised an exception. Then
            none of its variants is registered.

    Example:
        >>> import attnzoo
        >>> attnzoo.load_plugin("folder/cube.py").variants  # doctest: +SKIP
        ('cube',)
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be that of a Python file, got {shown(path)}")
    file = Path(path).resolve()
    name = file.stem
    if file.suffix != ".py" or not file.is_file():
        missing = "" if file.exists() else ": no such file"
        raise ValueError(f"plugin must be a Python file, got {os.fspath(path)!r}{missing}")
    if not name.isidentifier() or iskeyword(name):
        raise ValueError(
            f"plugin must have a file name that is a module name, such as my_variant.py, got {file}"
        )
    known = _LOADED.get(name)
    if known is not None and known.file == file:
        return known
    owner = _owner(name)
    if owner == str(file) and name in sys.modules:
        raise ValueError(f"plugin must not be imported before load_plugin loads it, got {file}")
    if owner not in (None, str(file)):
        raise ValueError(
            f"plugin {file} must have a free module name, {name!r} is taken by {owner}"
        )
    before = set(list_variants())
    try:
        module = _executed(name, file)
    except BaseException:
        # Variants of other modules stay: Python would not execute these modules again.
        remove_variants(name)
        raise
    plugin = Plugin(file, module, tuple(n for n in list_variants() if n not in before))
    _LOADED[name] = plugin
    return plugin


def _owner(name: str) -> str | None:
    """The file or a description of the module that ``import name`` would load, or None."""
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
        return "a loaded module" if path is None else str(Path(path).resolve())
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).resolve()) if spec.has_location else f"a {spec.origin} module"


def _executed(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):
            raise ValueError(f"plugin {file} called sys.exit({error.code!r})") from error
        if isinstance(error, Exception):  # the file may raise anything
            raise ValueError(f"plugin {file} raised {type(error).__name__}: {error}") from error
        raise
    return module
