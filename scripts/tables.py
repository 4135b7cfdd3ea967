"""Fills the generated parts of README.md and docs/: variants, tasks, versions, results, a trace.

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, in any page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attnzoo
from commandline.errors import UsageError
from commandline.table import markdown
from evals.reporting.pages import documented, overview, scores, tasks_table
from evals.tasks import EXPERIMENTS
from scripts import variant_facts as facts
from scripts.call_path import call_path
from scripts.families_table import families_facts, families_table
from scripts.kernels_table import kernels_table
from scripts.profile_table import profile_table
from scripts.support_table import support_table
from scripts.versions_table import versions_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
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
    generated = {f"{name}.md" for name in attnzoo.list_variants()}
    for path in sorted((root / "docs").rglob("*.md")):
        if "_build" not in path.parts and not (
            path.parent.name == "variants" and path.name in generated
        ):
            yield path


def rendered(path: Path) -> str:
    """The page with its tables filled."""
    text = path.read_text()
    names = [match["name"] for match in BLOCK.finditer(text)]
    if len(MARKER.findall(text)) != 2 * len(names):
        raise UsageError(f"{path}: each `begin` needs an `end` of the same name after it")
    if unknown := set(names) - set(BLOCKS):
        raise UsageError(
            f"{path}: unknown table {', '.join(sorted(unknown))}; known: {', '.join(BLOCKS)}"
        )

    def filled(match: re.Match[str]) -> str:
        return match["begin"] + BLOCKS[match["name"]](path) + match["end"]

    return BLOCK.sub(filled, text)


def variants_table(page: Path) -> str:
    """A Markdown table of the name, formula, paper and use of each variant. In pages of the folder
    ``variants``, each name is a link to the variant's page."""
    linked = page.parent.name == "variants"
    rows: list[tuple[str, ...]] = [("variant", "formula", "paper", "when to use")]
    for name in attnzoo.list_variants():
        variant = attnzoo.get_variant(name)
        shown = f"[`{name}`]({name}.md)" if linked else f"`{name}`"
        paper = facts.linked(variant.paper)
        rows.append((shown, facts.prose(variant.formula), paper, facts.prose(variant.use)))
    return markdown(rows)


def forms_table() -> str:
    """A Markdown table of the variants by their forms, and of the backends that run each form."""
    rows = [("form", "variants", "backends besides `eager` and `tiled`")]
    for kind, backends in facts.BACKENDS.items():
        names = [f"`{name}`" for name in attnzoo.list_variants() if kind in facts.kinds(name)]
        if names:
            rows.append((kind, ", ".join(names), backends))
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
    **{name: lambda page, name=name: documented(RESULTS, name) for name in EXPERIMENTS},
    **{
        name.replace(".", "-"): lambda page, name=name: documented(RESULTS, name)
        for name in ("pretrained", "pretrained.new-variants", "adapt")
    },
    "kernels": lambda page: kernels_table(),
    "profile": lambda page: profile_table(),
}

if __name__ == "__main__":
    sys.exit(main())
