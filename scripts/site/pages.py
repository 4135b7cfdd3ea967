"""Writes a page for each variant before Sphinx reads the documentation."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from jinja2 import Template
from torch._subclasses import FakeTensorMode

import attnzoo
from commandline.table import markdown
from commandline.variants import VariantCall, complete
from evals.reporting.pages import with_curves
from scripts import variant_facts as facts
from scripts.site import variant_plots

FOLDER = "variants"
DOCS = Path(__file__).resolve().parents[2] / "docs"
TEMPLATE = DOCS / "_templates" / "variant.jinja"
EXPLORER = DOCS / "_static" / "explore-formulas.js"
# Files in the repository root that are also pages of the site.
INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
HEADS, HEAD_DIM, KEYS = 8, 64, 4096
# A call for each column of the table of backends: number of queries, device, dtype, gradients.
CALLS = {
    "CPU, training": (KEYS, "cpu", torch.float32, True),
    "GPU, training": (KEYS, "cuda", torch.bfloat16, True),
    "GPU, one query": (1, "cuda", torch.bfloat16, False),
}


def page(name: str) -> str:
    """The page of a variant, in MyST."""
    variant = attnzoo.get_variant(name)
    summary, sections = facts.docstring(variant)
    costs = [f"{form.kind}: {facts.cost(form)}" for form in facts.forms_of(name)]
    return Template(TEMPLATE.read_text()).render(
        variant=variant, summary=summary, sections=sections, costs="; ".join(costs),
        required=required(name), parameters=parameters(variant), backends=backends(variant),
        row=variant_plots.ROW, lead=f"{variant_plots.LEAD:g}", heads=HEADS, keys=KEYS,
        head_dim=HEAD_DIM, file=Path(inspect.getfile(sys.modules[facts.module_of(variant)])).name,
        prose=facts.prose, typeset=facts.typeset, linked=facts.linked, explorer=explorer(variant),
    )  # fmt: skip


def in_explorer() -> list[str]:
    """The names of the variants that the page "explore" shows."""
    table = EXPLORER.read_text().split("\n  const VARIANTS = {\n")[1].split("\n  };\n")[0]
    return re.findall(r"^    (\w+): \{", table, re.MULTILINE)


def explorer(variant: attnzoo.Variant) -> str | None:
    """The address part that shows the variant beside softmax, with the logits of the growth plot;
    None if the explorer does not have it."""
    if variant.name not in in_explorer():
        return None
    parts = [f"gap={variant_plots.LEAD:g}", "noise=1"]
    parts.append("v=" + ",".join(dict.fromkeys([variant_plots.BASELINE, variant.name])))
    values = {p.name: p.default for p in variant.params} | required(variant.name)
    for name, value in values.items():
        if value is not None:
            parts.append(f"{variant.name}.{name}={str(value).lower()}")
    return "&".join(parts)


def required(name: str) -> dict[str, Any]:
    """Example values of the variant's required parameters."""
    return complete(VariantCall(name), KEYS).params


def parameters(variant: attnzoo.Variant) -> str:
    shapes = {"per_head": "number, `()` or `(H,)`", "tensor": "tensor `(H, …)`"}
    rows = [("name", "meaning", "default", "initial value", "type")]
    for p in variant.params:
        initial = "–" if p.init is None else "the default"
        if isinstance(p.init, float | int):
            initial = f"{p.init:.3g}"
        shape = shapes.get(p.kind, p.kind) + (", `(B, H, Nq)`" if p.per_token else "")
        allowed = "" if p.allowed == "finite" else f". Allowed: {facts.prose(p.allowed)}"
        rows.append((f"`{p.name}`", facts.prose(p.doc) + allowed, facts.default(p), initial, shape))
    return markdown(rows)


def backends(variant: attnzoo.Variant) -> str:
    """A table of the candidates that `attnzoo.explain` lists for each of `CALLS`."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for title, options in CALLS.items():
        first = "**first**"
        for candidate in explained(variant, *options).candidates:
            row = cells.setdefault((f"`{candidate.backend}`", candidate.form.kind), {})
            if candidate.reason is not None:
                row.setdefault(title, facts.prose(candidate.reason))
            else:
                row[title], first = first, "yes"
    rows = [(*pair, *(row.get(title, "–") for title in CALLS)) for pair, row in cells.items()]
    return markdown([("backend", "form", *CALLS), *rows])


def explained(
    variant: attnzoo.Variant, queries: int, device: str, dtype: torch.dtype, grad: bool
) -> attnzoo.Plan:
    # Fake tensors take no memory, and their device need not exist on this machine.
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, HEADS, n, HEAD_DIM, device=device, dtype=dtype, requires_grad=grad)
            for n in (queries, KEYS, KEYS)
        )
        return attnzoo.explain(q, k, v, variant.name, is_causal=True, **required(variant.name))


def write(folder: Path) -> None:
    """Write the pages and their plots, and remove those of variants that no longer exist."""
    files = {}
    for name in attnzoo.list_variants():
        files[f"{name}.md"] = page(name)
        for which, plot in variant_plots.PLOTS.items():
            svg = plot(name)
            files[f"plots/{name}-{which}.svg"] = svg
            files[f"plots/{name}-{which}-dark.svg"] = variant_plots.darkened(svg)
    for path in [*folder.glob("*.md"), *folder.glob("plots/*")]:
        if path.name != "index.md" and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        path = folder / name
        # Unchanged pages are not written, so that Sphinx does not read them again.
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def relink(text: str, folder: Path, docs: Path) -> str:
    """Rewrite the relative links of a page in ``folder`` for the site.

    A link to a file that is not part of the site becomes plain text.
    """

    def target(match: re.Match[str]) -> str:
        label, link, anchor = match.groups(default="")
        path = (folder / link).resolve()
        if path.is_relative_to(docs):
            return f"[{label}](/{path.relative_to(docs).as_posix()}{anchor})"
        if path.parent == docs.parent and path.name in INCLUDED:
            return f"[{label}](/{INCLUDED[path.name]}{anchor})"
        return label

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|[#/])([^)#\s]+)(#[^)]*)?\)", target, text)


def on_read(app: Any, docname: str, source: list[str]) -> None:
    if app.env.doc2path(docname).suffix == ".md":
        on_include(app, Path(docname), docname, source)


def on_include(app: Any, path: Path, docname: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    source[0] = relink(with_curves(source[0]), (docs / path).resolve().parent, docs)


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / FOLDER))
    app.connect("source-read", on_read)
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
