"""The table of the variants' parameters and of the arguments that each variant takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import attnzoo
from benchmarks.harness.cases import Case
from commandline.table import markdown
from scripts import variant_facts as facts

COLUMNS = (
    "variant",
    "parameters",
    "without `is_causal`",
    "float masks, ALiBi",
    "`softcap`",
    "`return_lse`",
    "rows sum to 1",
    "[loss](losses.md)",
    "[state](decoding.md)",
)


def support_table() -> str:
    """A Markdown table. Calls with small tensors show which arguments a variant takes."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name in attnzoo.list_variants():
        variant = attnzoo.get_variant(name)
        call = partial(_call, name)
        cells = (
            _works(call, is_causal=False),
            _works(call, alibi=torch.zeros(1)) and _works(call, attn_mask=torch.zeros(2, 2)),
            _works(call, softcap=30.0),
            _works(call, return_lse=True),
            variant.normalized,
            _works(partial(_loss, name)),
            "linear" in facts.kinds(name),
        )
        parameters = ", ".join(map(_parameter, variant.params))
        rows.append((f"`{name}`", parameters, *("yes" if x else "–" for x in cells)))
    return markdown(rows)


def _call(name: str, **options: Any) -> None:
    x = torch.ones(1, 1, 2, 4)
    params = Case.parse(name, facts.LENGTH).params
    attnzoo.attention(x, x, x, name, **{"is_causal": True, **params, **options})


def _loss(name: str) -> None:
    variant = attnzoo.get_variant(name)
    params = {**Case.parse(name, 2).params, **(variant.output_defaults or {})}
    attnzoo.losses.linear_loss(
        torch.ones(1, 4), torch.ones(2, 4), torch.zeros(1, dtype=torch.long), name, **params
    )


def _works(function: Callable[..., None], **options: Any) -> bool:
    try:
        function(**options)
    except ValueError:
        return False
    return True


def _parameter(param: attnzoo.Param) -> str:
    if param.default is attnzoo.REQUIRED:
        return f"`{param.name}` (required)"
    shown = repr(param.default) if isinstance(param.default, str) else facts.default(param)
    return f"`{param.name}={shown}`"
