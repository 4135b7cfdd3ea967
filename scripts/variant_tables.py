"""The tables of variants: formulas and papers, forms and backends, parameters and arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import attnzoo
from benchmarks.harness.cases import Case
from commandline.table import markdown
from scripts import variant_facts as facts

BACKENDS = {
    "pairwise": "`sdpa` (softmax only), `flash`, `decode`",
    "linear": "`linear`, `flash_linear`",
    "shares": "`flash_shares`",
    "definition only": "none",
}


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
    for kind, backends in BACKENDS.items():
        names = [f"`{name}`" for name in attnzoo.list_variants() if kind in kinds(name)]
        if names:
            rows.append((kind, ", ".join(names), backends))
    return markdown(rows)


def kinds(name: str) -> list[str]:
    """The keys of `BACKENDS` that describe the variant."""
    return [form.kind for form in facts.forms_of(name)] or ["definition only"]


def support_table() -> str:
    """A Markdown table. Calls with small tensors show which arguments a variant takes."""
    columns = (
        "without `is_causal`", "float masks, ALiBi", "`softcap`", "`return_lse`", "rows sum to 1",
        "[loss](losses.md)", "[state](decoding.md)",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [("variant", "parameters", *columns)]
    x, labels = torch.ones(1, 1, 2, 4), torch.zeros(1, dtype=torch.long)
    for name in attnzoo.list_variants():
        variant = attnzoo.get_variant(name)
        params = Case.parse(name, facts.LENGTH).params
        of_loss = {**Case.parse(name, 2).params, **(variant.output_defaults or {})}
        call = partial(works, attnzoo.attention, x, x, x, name, **params)
        causal = partial(call, is_causal=True)
        cells = (
            call(),
            causal(alibi=torch.zeros(1)) and causal(attn_mask=torch.zeros(2, 2)),
            causal(softcap=30.0),
            causal(return_lse=True),
            variant.normalized,
            works(attnzoo.losses.linear_loss, x[0, 0, :1], x[0, 0], labels, name, **of_loss),
            "linear" in kinds(name),
        )
        shown = ", ".join(map(parameter, variant.params))
        rows.append((f"`{name}`", shown, *("yes" if cell else "–" for cell in cells)))
    return markdown(rows)


def works(call: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    try:
        call(*arguments, **options)
    except ValueError:
        return False
    return True


def parameter(param: attnzoo.Param) -> str:
    if param.default is attnzoo.REQUIRED:
        return f"`{param.name}` (required)"
    shown = repr(param.default) if isinstance(param.default, str) else facts.default(param)
    return f"`{param.name}={shown}`"
