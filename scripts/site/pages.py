"""Writes a page for each variant before Sphinx reads the documentation."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

import attnzoo
from commandline.table import markdown
from scripts import variant_facts as facts
from scripts.site import variant_plots

FOLDER = "variants"
# Files in the repository root that are also pages of the site.
INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# The docstring's sections above the plots, and those below the table of parameters.
FIRST, LAST = ("Effect",), ("Initial values", "Source", "Differences", "Notes")
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
    return "\n\n".join(
        [
            f"# {name}",
            facts.prose(summary[:1].upper() + summary[1:]),
            formula(sections.get("Formula", variant.formula)),
            f"**When to use it:** {facts.prose(variant.use)}",
            f"**Paper:** {facts.linked(variant.paper)}",
            call(variant),
            "## What it does to a row of scores",
            *(facts.prose(sections[head]) for head in FIRST if head in sections),
            plots(name),
            "## Parameters",
            parameters(variant),
            *(f"## {head}\n\n{facts.prose(sections[head])}" for head in LAST if head in sections),
            "## Cost and backends",
            cost(name),
            backends(variant),
            "## The file",
            "This file is the whole variant. "
            "[A variant of your own](../your-own-variant.md) has the same structure.",
            source(variant),
        ]
    )


def formula(text: str) -> str:
    lines = "".join(f"<div>{facts.typeset(line)}</div>\n" for line in text.splitlines() if line)
    return f'<div class="formula">\n{lines}</div>'


def call(variant: attnzoo.Variant) -> str:
    required = "".join(f", {n}={x!r}" for n, x in variant_plots.required(variant, KEYS).items())
    return (
        "```python\nimport torch\nimport attnzoo\n\n"
        "q, k, v = torch.randn(3, 1, 8, 256, 64)  # (B, H, N, D)\n"
        f'out = attnzoo.attention(q, k, v, "{variant.name}", is_causal=True{required})\n```'
    )


def plots(name: str) -> str:
    row = f"The weights of {name} against the logits of a row of {variant_plots.ROW} keys"
    growth = f"The weight that {name} gives a leading key, against the number of keys n"
    images = "".join(
        f"```{{image}} plots/{name}-{which}{suffix}.svg\n:class: {theme}\n:alt: {alt}\n```\n\n"
        for which, alt in (("row", row), ("growth", growth))
        for suffix, theme in (("", "only-light"), ("-dark", "only-dark"))
    )
    return (
        f":::{{container}} plots\n{images}:::\n\n"
        f"First plot: the weights of one row of {variant_plots.ROW} keys, against their "
        f"logits. Second plot: the weight of a key with logit {variant_plots.LEAD:g} among n − 1 "
        "keys whose logits are drawn from N(0, 1). Parameters have their default values; "
        "softmax is dashed."
    )


def _initial(param: attnzoo.Param) -> str:
    if param.init is None:
        return "–"
    return f"{param.init:.3g}" if isinstance(param.init, float | int) else "the default"


def parameters(variant: attnzoo.Variant) -> str:
    if not variant.params:
        return f"`{variant.name}` has no parameters."
    header = ("name", "type", "default", "initial value", "meaning")
    shapes = {"per_head": "number, `()` or `(H,)`", "tensor": "tensor `(H, …)`"}
    rows = [
        (
            f"`{p.name}`",
            shapes.get(p.kind, p.kind) + (", `(B, H, Nq)`" if p.per_token else ""),
            facts.default(p),
            _initial(p),
            facts.prose(p.doc)
            + ("" if p.allowed == "finite" else f". Allowed: {facts.prose(p.allowed)}"),
        )
        for p in variant.params
    ]
    learned = (
        "A parameter with an initial value is learned by {py:class}`attnzoo.nn.Attention`, one "
        "number per head. The others stay fixed unless you name them in `learn`."
    )
    return markdown([header, *rows]) + "\n" + learned


def cost(name: str) -> str:
    forms = facts.forms_of(name)
    costs = "; ".join(f"{form.kind}: {facts.cost(form)}" for form in forms)
    return (
        f"Cost per head, for N queries and keys of dimension D: {costs or 'definition: N²·D'}.\n\n"
        "The table shows which backends support the variant, in causal calls with "
        f"{HEADS} heads, {KEYS} keys and D = {HEAD_DIM}. “first” marks the chosen backend. "
        "If a backend does not support a call, the cell shows the reason."
    )


def backends(variant: attnzoo.Variant) -> str:
    """A table of the candidates that `attnzoo.explain` lists for each of `CALLS`."""
    plans = {title: explained(variant, *options) for title, options in CALLS.items()}
    pairs = dict.fromkeys(
        (c.backend, c.form.kind) for plan in plans.values() for c in plan.candidates
    )
    rows = [("backend", "form", *plans)]
    for pair in pairs:
        rows.append((f"`{pair[0]}`", pair[1], *(answer(plan, *pair) for plan in plans.values())))
    return markdown(rows)


def explained(
    variant: attnzoo.Variant, queries: int, device: str, dtype: torch.dtype, grad: bool
) -> attnzoo.Plan:
    # Fake tensors take no memory, and their device need not exist on this machine.
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, HEADS, n, HEAD_DIM, device=device, dtype=dtype, requires_grad=grad)
            for n in (queries, KEYS, KEYS)
        )
        params = variant_plots.required(variant, KEYS)
        return attnzoo.explain(q, k, v, variant.name, is_causal=True, **params)


def answer(plan: attnzoo.Plan, backend: str, kind: str) -> str:
    able = [(c.backend, c.form.kind) for c in plan.candidates if c.reason is None]
    if (backend, kind) in able:
        return "**first**" if able[0] == (backend, kind) else "yes"
    reasons = [c.reason for c in plan.candidates if (c.backend, c.form.kind) == (backend, kind)]
    return facts.prose(reasons[0] or "") if reasons else "–"


def source(variant: attnzoo.Variant) -> str:
    file = Path(inspect.getfile(sys.modules[facts.module_of(variant)]))
    return f"```{{literalinclude}} ../../attnzoo/variants/{file.name}\n:language: python\n```"


def write(folder: Path) -> None:
    """Write the pages and their plots, and remove those of variants that no longer exist."""
    files = {}
    for name in attnzoo.list_variants():
        files[f"{name}.md"] = page(name)
        pictures = {"row": variant_plots.row_plot, "growth": variant_plots.growth_plot}
        for which, drawn in pictures.items():
            svg = drawn(name)
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
    docs = Path(app.srcdir)
    if app.env.doc2path(docname).suffix == ".md":
        source[0] = relink(source[0], (docs / docname).parent, docs)


def on_include(app: Any, path: Path, docname: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    source[0] = relink(source[0], (docs / path).resolve().parent, docs)


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / FOLDER))
    app.connect("source-read", on_read)
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
