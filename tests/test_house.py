"""Structure of the repository: imports between packages, one file per variant, short files."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import attnzoo

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attnzoo"
FILES = sorted(PACKAGE.rglob("*.py"))
ALL = [path for top in ("attnzoo", "commandline", "evals", "benchmarks", "scripts")
       for path in sorted((ROOT / top).rglob("*.py"))]  # fmt: skip


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


NAMES = [module_name(path) for path in FILES]
KNOWN = {module_name(path) for path in ALL}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """Return the full names that a file imports, also in functions and for type checking."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in KNOWN else str(node.module)


# The packages that each package may import besides itself. Only attnzoo.functional may import both
# variants and backends.
MAY_IMPORT: dict[str, set[str]] = {
    "attnzoo.core": set(),
    "attnzoo.variants": {"attnzoo.core"},
    "attnzoo.backends": {"attnzoo.core"},
    "attnzoo.functional": {"attnzoo.core", "attnzoo.variants", "attnzoo.backends"},
    "attnzoo.losses": {"attnzoo.core", "attnzoo.backends", "attnzoo.functional"},
    "attnzoo.nn": {"attnzoo.core", "attnzoo.functional", "attnzoo.losses"},
    "attnzoo.distributed": {
        "attnzoo.core",
        "attnzoo.backends",
        "attnzoo.functional",
        "attnzoo.nn",
    },
    "attnzoo.integrations": {"attnzoo.core", "attnzoo.functional", "attnzoo.losses", "attnzoo.nn"},
    "attnzoo": {
        "attnzoo.core",
        "attnzoo.functional",
        "attnzoo.losses",
        "attnzoo.nn",
        "attnzoo.integrations",
    },
    "attnzoo.__main__": {"attnzoo", "attnzoo.backends"},
    "commandline": {"attnzoo"},
    "evals": {"attnzoo", "commandline"},
    "benchmarks": {"attnzoo", "commandline"},
    "scripts": {"attnzoo", "commandline", "evals", "benchmarks"},
}
# Subpackages and modules of evals and benchmarks. Each may import itself and those before it.
ORDER = {
    "evals": [
        *"task measures tasks results plugins progress checkpoints conversion run".split(),
        *"options sweeps study plan launch loggers command theory reporting".split(),
        *"pretrained __main__".split(),
    ],
    "benchmarks": "harness suites kernels gpu __main__".split(),
}


def package_of(name: str) -> str:
    """Map attnzoo.backends.sdpa to attnzoo.backends, and evals.tasks.mqar to evals."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "attnzoo" else parts[0]


def test_dependencies_point_one_way() -> None:
    ours = ("attnzoo", "commandline", "evals", "benchmarks", "scripts")
    for path in ALL:
        module = module_name(path)
        assert package_of(module) in MAY_IMPORT, f"add {package_of(module)} to MAY_IMPORT"
        allowed = {package_of(module), *MAY_IMPORT[package_of(module)]}
        for name in (n for n in imports(path) if n.split(".")[0] in ours):
            # For a file outside attnzoo, only the top-level package of the import is checked here.
            # test_evals_and_benchmarks_use_public_names checks the names in evals and benchmarks.
            inside = name.split(".")[0] if module.split(".")[0] != "attnzoo" else package_of(name)
            assert inside in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("top", ORDER)
def test_evals_and_benchmarks_import_in_order(top: str) -> None:
    for path in (ROOT / top).rglob("*.py"):
        module = module_name(path).split(".")
        if len(module) == 1:
            continue
        for name in (n.split(".") for n in imports(path)):
            if name[0] == top and len(name) > 1:
                order = ORDER[top]
                assert order.index(name[1]) <= order.index(module[1]), f"{path} imports {name}"


def test_no_import_cycles() -> None:
    """Imports inside functions and for type checking count too."""
    graph = {module_name(path): {n for n in imports(path) if n in KNOWN} for path in ALL}
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, " -> ".join((*chain, name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*chain, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def at_import(path: Path) -> set[str]:
    """Return the names that a file imports outside of functions."""
    inside = {
        inner
        for node in nodes_of(path)
        if isinstance(node, (ast.FunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    names = set()
    for node in nodes_of(path):
        if node not in inside and isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node not in inside and isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_triton_is_imported_only_when_a_kernel_is_launched() -> None:
    """Modules that do not import Triton import the modules that do only inside functions."""
    folder = PACKAGE / "backends" / "triton"
    users = {module_name(path) for path in FILES if "triton" in at_import(path)}
    assert users
    for path in FILES:
        name = module_name(path)
        if name in users:
            assert folder in path.parents, path
        elif not name.startswith("attnzoo.backends.triton.") or path.stem in (
            "backend",
            "operators",
        ):
            assert not users & at_import(path), path
    imported = at_import(folder / "common" / "tiles.py")
    assert not [name for name in imported if name.split(".")[0] in ("attnzoo", "torch", "triton")]


def test_only_variants_with_shared_mathematics_import_each_other() -> None:
    imported = {
        (path.stem, name.rsplit(".", 1)[-1])
        for path in (PACKAGE / "variants").glob("*.py")
        for name in imports(path)
        if name.startswith("attnzoo.variants.")
    }
    assert imported == {("entmax", "sparsemax"), ("asentmax", "entmax"), ("cosformer", "elu")}


PUBLIC = (
    "attnzoo", "attnzoo.distributed", "attnzoo.losses", "attnzoo.nn",
    "attnzoo.integrations.transformers",
)  # fmt: skip


@pytest.mark.parametrize("folder", ["evals", "benchmarks"])
def test_evals_and_benchmarks_use_public_names(folder: str) -> None:
    """Only benchmarks.kernels may also import backends, because it compiles the kernels."""
    public = {*attnzoo.__all__, "__version__"}
    for path in sorted((ROOT / folder).rglob("*.py")):
        compiles = path.parent.name == "kernels"
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "attnzoo":
                        assert alias.name in PUBLIC, path
            elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "attnzoo":
                kernels = compiles and str(node.module).startswith("attnzoo.backends")
                assert kernels or node.module in PUBLIC, path
                if node.module == "attnzoo":
                    assert {alias.name for alias in node.names} <= public, path
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "attnzoo"
            ):
                assert node.attr in public, f"{path}: attnzoo.{node.attr}"


def test_import_registers_the_variants_and_loads_no_heavy_package() -> None:
    code = (
        "import sys, attnzoo; assert len(attnzoo.list_variants()) >= 12; "
        "heavy = {'triton', 'transformers', 'matplotlib', 'scipy', 'entmax', 'torch._dynamo', "
        "'torch._inductor', 'evals', 'benchmarks'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", ["attnzoo", "tests", "evals", "benchmarks"])
def test_files_are_short(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert len(path.read_text().splitlines()) < 500, path


def test_eval_tasks_import_only_the_core_dependencies() -> None:
    known = {
        "torch",
        "numpy",
        "einops",
        "attnzoo",
        "commandline",
        "evals",
        *sys.stdlib_module_names,
    }
    for path in [*(ROOT / "evals" / "tasks").glob("*.py"), ROOT / "evals" / "run.py"]:
        assert {name.split(".")[0] for name in at_import(path)} <= known, path


def test_each_file_in_variants_defines_one_variant() -> None:
    shipped = {path.stem for path in (PACKAGE / "variants").glob("*.py")} - {"__init__"}
    assert shipped == set(attnzoo.list_variants())
    for name in shipped:
        module = importlib.import_module(f"attnzoo.variants.{name}")
        assert module.VARIANT is attnzoo.get_variant(name)
        variants = [x for x in vars(module).values() if isinstance(x, attnzoo.Variant)]
        assert variants == [module.VARIANT]


# Files that may name variants, because they treat single variants, baselines or presets, or list
# test files.
ABOUT_VARIANTS = {
    "attnzoo/core/activations.py",
    "attnzoo/nn/taylor.py",
    "benchmarks/gpu/checks.py",
    "benchmarks/gpu/measurements.py",
    "benchmarks/gpu/stages.py",
    "benchmarks/harness/baselines.py",
    "benchmarks/harness/presets.py",
    "benchmarks/suites/losses.py",
    "evals/pretrained/options.py",
    "evals/pretrained/sharpness.py",
    "evals/task.py",
    "evals/theory/closed_forms.py",
    "evals/theory/in_context.py",
    "scripts/arithmetic.py",
    "scripts/call_path.py",
}
# Variant names that have a second meaning in the code, such as the function sigmoid.
ALSO_WORDS = {"sink", "log_n", "sigmoid"}
# Files in which "entmax" is the name of the Python package.
PACKAGES = {"benchmarks/harness/report.py", "benchmarks/suites/attention.py"}


def test_general_code_names_no_variant() -> None:
    """Softmax, docstrings, attnzoo/variants, evals/tasks and the files listed above are exempt."""
    names = set(attnzoo.list_variants()) - {"softmax"} - ALSO_WORDS
    for path in ALL:
        place = path.relative_to(ROOT).as_posix()
        if place in ABOUT_VARIANTS | PACKAGES or place.startswith(
            ("attnzoo/variants/", "evals/tasks/")
        ):
            continue
        docstrings = {
            node.body[0].value
            for node in nodes_of(path)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = set(re.findall(r"\w+", node.value))
                assert node in docstrings or not words & names, f"{place}, line {node.lineno}"


# Words that say that a thing was passed, computed or left over, but not what it is.
VAGUE = {"found", "given", "kept", "own", "places", "rest", "said", "whole"}
# Public names: `Call.places`, the argument ``given`` of `nn.Attention`.
PUBLIC_NAMES = {
    ("attnzoo/core/visibility.py", "places"),
    ("attnzoo/nn/attention.py", "given"),
    ("attnzoo/nn/parameters.py", "given"),
}


def bound_name(node: ast.AST) -> str | None:
    """The name that a node binds: of a variable, argument, attribute, function or class."""
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return name if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    return node.asname if isinstance(node, ast.alias) else None


def test_names_say_what_they_hold() -> None:
    wrong: list[str] = []
    classes: dict[str, list[str]] = {"attnzoo": [], "evals": [], "benchmarks": []}
    for path in (*ALL, *sorted((ROOT / "tests").rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        for node in nodes_of(path):
            word = (bound_name(node) or "").strip("_").lower()
            if word in VAGUE and (place, word) not in PUBLIC_NAMES:
                wrong.append(f"{place}, line {getattr(node, 'lineno', '?')}: {word}")
            if isinstance(node, ast.ClassDef) and (package := place.split("/")[0]) in classes:
                classes[package].append(node.name)
    assert wrong == []
    for names in classes.values():
        assert sorted(names) == sorted(set(names))


def test_no_name_starts_with_supports_and_no_code_reads_environment_variables() -> None:
    for path in FILES:
        nodes = nodes_of(path)
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not {name for name in names if name.startswith("supports_")}, path
        # The cache folder of the user is $XDG_CACHE_HOME.
        assert path.stem == "measured" or not {"environ", "getenv"} & names, path


@pytest.mark.parametrize("name", attnzoo.__all__)
def test_public_names_have_docstrings_and_functions_have_examples(name: str) -> None:
    public = getattr(attnzoo, name)
    if isinstance(public, (type, ModuleType)) or callable(public):
        assert (public.__doc__ or "").strip()
    if callable(public) and not isinstance(public, type):
        assert "Example:" in public.__doc__


def test_names_in_all_exist_and_are_unique() -> None:
    assert len(set(attnzoo.__all__)) == len(attnzoo.__all__)
    assert all(hasattr(attnzoo, name) for name in attnzoo.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_doctests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the examples in a module's docstrings. Variants that they register are removed."""
    monkeypatch.setattr(attnzoo.core.registry, "_VARIANTS", dict(attnzoo.core.registry._VARIANTS))
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0
    examples = {
        "attnzoo.functional.attention": 6,
        "attnzoo.core.registry": 7,
        "attnzoo.nn.attention": 5,
        "attnzoo": 3,
    }
    assert outcome.attempted >= examples.get(name, 0)


def test_files_have_no_merge_conflict_markers() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.py")]
    marker = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    assert [str(path) for path in [*ALL, *pages] if marker.search(path.read_text())] == []
