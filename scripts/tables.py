"""Fills the generated parts of README.md and docs/: variants, tasks, versions, results, a trace.

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, in any page.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import attnzoo
from commandline.errors import UsageError
from commandline.table import markdown
from evals.reporting.pages import (
    documented,
    legend,
    overview,
    rounded_parts,
    rounded_pretrained,
    scores,
    table_1,
    tasks_table,
)
from evals.tasks import EXPERIMENTS
from scripts.benchmark_tables import cost_table, kernels_table, profile_table
from scripts.call_path import call_path
from scripts.families_table import families_facts, families_table
from scripts.headlines import headlines_sections
from scripts.variant_tables import forms_table, support_table, variants_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
CONSTRAINTS = ("constraints.txt", "constraints-oldest.txt")
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<name>[\w-]+): begin[^\n]*-->\n).*?(?P<end><!-- (?P=name): end -->)",
    re.DOTALL,
)
MARKER = re.compile(r"<!-- [\w-]+: (?:begin|end)\b")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is outdated"
    )
    args = parser.parse_args(arguments)
    try:
        outdated = {path: new for path in pages() if (new := rendered(path)) != path.read_text()}
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    for path, new in outdated.items():
        if args.check:
            print(f"{path.relative_to(ROOT)} is outdated: run `make tables`", file=sys.stderr)
        else:
            path.write_text(new)
    return 1 if outdated and args.check else 0


def pages(root: Path = ROOT) -> Iterator[Path]:
    """All hand-written pages, including the README."""
    yield from sorted(root.glob("*.md"))
    generated = [root / "docs" / "variants" / f"{name}.md" for name in attnzoo.list_variants()]
    for path in sorted((root / "docs").rglob("*.md")):
        if "_build" not in path.parts and path not in generated:
            yield path


def rendered(path: Path) -> str:
    """The page with its tables filled."""
    text = path.read_text()
    names = [match["name"] for match in BLOCK.finditer(text)]
    if len(MARKER.findall(text)) != 2 * len(names):
        raise UsageError(f"{path}: each `begin` needs an `end` of the same name after it")
    if unknown := ", ".join(sorted(set(names) - set(BLOCKS))):
        raise UsageError(f"{path}: unknown table {unknown}; known: {', '.join(BLOCKS)}")
    return BLOCK.sub(lambda m: m["begin"] + BLOCKS[m["name"]](path) + m["end"], text)


def versions_table(root: Path = ROOT) -> str:
    """A Markdown table of the versions that attnzoo requires and that its tests pass with.

    The required ones are those of pyproject.toml; the tested ones are those of the files of
    constraints and, for Python, the classifiers of pyproject.toml.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pythons = (line.split(" :: ")[-1] for line in project["classifiers"] if "Python ::" in line)
    required = {"python": project["requires-python"].removeprefix(">=")}
    tested = {"python": [version for version in pythons if "." in version]}
    for entry in chain(project["dependencies"], *project["optional-dependencies"].values()):
        package = Requirement(entry)
        required.update((package.name, bound.version) for bound in package.specifier)
    for line in "".join((root / file).read_text() for file in CONSTRAINTS).splitlines():
        if line and not line.startswith("#"):
            package = Requirement(line)
            tested.setdefault(package.name, []).extend(x.version for x in package.specifier)
    rows = [("package", "required", "oldest tested", "newest tested")]
    for name in ("Python", "PyTorch", "Triton", "transformers", "numpy"):
        package = "torch" if name == "PyTorch" else name.lower()
        versions = sorted(tested[package], key=Version)
        lower = f"{required[package]} or later" if package in required else "any"
        rows.append((name, lower, versions[0], versions[-1]))
    return markdown(rows)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "variants": variants_table,
    "tasks": lambda page: tasks_table(),
    "forms": lambda page: forms_table(),
    "support": lambda page: support_table(),
    "versions": lambda page: versions_table(),
    "families": lambda page: families_table(),
    "families-facts": lambda page: families_facts(),
    "call-path": lambda page: call_path(),
    "evals": lambda page: scores(RESULTS),
    "results": lambda page: overview(RESULTS),
    "legend": lambda page: legend(RESULTS),
    "rounding": lambda page: table_1(RESULTS),
    "headlines": lambda page: headlines_sections(),
    "rounded-parts": lambda page: rounded_parts(RESULTS),
    "rounded-pretrained": lambda page: rounded_pretrained(RESULTS),
    **{name: lambda page, name=name: documented(RESULTS, name) for name in EXPERIMENTS},
    **{
        name.replace(".", "-"): lambda page, name=name: documented(RESULTS, name)
        for name in ("pretrained", "pretrained.new-variants", "adapt")
    },
    "cost": lambda page: cost_table(),
    "kernels": lambda page: kernels_table(),
    "profile": lambda page: profile_table(),
}

if __name__ == "__main__":
    sys.exit(main())
