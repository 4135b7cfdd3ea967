"""Tables of the calls that each backend and each variant supports.

Tests check both directions: calls listed as `RUNS` must run, and all others must be rejected with a
message that contains the listed text. ``eager`` and ``tiled`` are not listed: they support every
call that the contract allows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.cases import CASES, CAUSAL_ONLY, NO_LSE, NO_SCORE, VARIANTS
from helpers.kernel_paths import Level, path_of

RUNS = None  # a table entry without a reason: the backend runs the call

# For each variant and backend: `RUNS`, or the reason why a plain call is rejected.
VARIANT_BACKENDS: dict[str, dict[str, str | None]] = {
    name: {
        "sdpa": case.rejects.get("sdpa"),
        "flash": case.rejects.get("flash"),
        "linear": case.rejects.get("linear"),
        "flash_linear": case.rejects.get("linear"),
        "flash_shares": RUNS if case.shares else "no shares form",
        "decode": case.rejects.get("decode", case.rejects.get("flash")),
    }
    for name, case in CASES.items()
}

FLASH = [name for name, reasons in VARIANT_BACKENDS.items() if reasons["flash"] is RUNS]
# Triton backends; tests use Triton's interpreter
KERNELS = ("flash", "decode", "flash_linear", "flash_shares")
FORWARD_ONLY = ("decode",)


def backends_of(variant: str) -> list[str]:
    """The backends that run a plain call."""
    table = VARIANT_BACKENDS[variant]
    return ["eager", "tiled", *(name for name in table if table[name] is RUNS)]


def marked(*values: str) -> Any:
    """Test parameters, with the mark ``interpreter`` if one of them is a Triton backend."""
    marks = [pytest.mark.interpreter] if {*KERNELS} & {*values} else []
    return pytest.param(*values, marks=marks, id="-".join(values))


# The first variant of each normalization. On Triton backends, all other variants are marked slow.
# On decode, only the first of all is quick: test_decode has quick tests of the others.
FIRST: dict[str, str] = {}
for _name in VARIANT_BACKENDS:
    _path = path_of(Level(_name, "default"), ("pairwise", "linear"))
    FIRST.setdefault(_path.normalize, _name)


def pair(variant: str, backend: str) -> Any:
    case = marked(variant, backend)
    slow = backend in KERNELS and variant not in FIRST.values()
    slow = slow or (backend == "decode" and variant != next(iter(FIRST.values())))
    marks = [*case.marks, pytest.mark.slow] if slow else case.marks
    return pytest.param(*case.values, marks=marks, id=case.id)


# PAIRS: (variant, backend) for each plain call that runs. TRAINED: those that support gradients.
PAIRS = [pair(variant, name) for variant in VARIANTS for name in backends_of(variant)]
TRAINED = [pair for pair in PAIRS if pair.values[1] not in FORWARD_ONLY]

# The same for code that only combines results: all variants on tiled, and one variant of each
# normalization on the other backends. One of each is enough for the quick tests, and softmax on the
# kernels and eager.
OUTSIDE = [
    pytest.param(*pair.values, marks=[*pair.marks, pytest.mark.slow], id=pair.id)
    if pair.values[0] not in FIRST.values()
    or (pair.values[0] != "softmax" and {*KERNELS, "eager"} & {*pair.values})
    else pair
    for pair in TRAINED
    if pair.values[0] in FIRST.values() or pair.values[1] == "tiled"
]


def precise(backend: str) -> torch.dtype:
    """The input dtype with which a backend is most accurate."""
    return torch.float32 if backend in KERNELS else torch.float64


# For each feature and each backend, the table gives `RUNS` or the reason for the rejection.
NOT_BOTH = "does not support attn_mask together with is_causal"
CONSTANT_MASK = "does not support a gradient for a float mask"
FORGET = "keys cannot be removed from a state"
TOP_LEFT = "torch aligns top-left"
OTHER_DV = "does not support a value dimension other than D"
EMPTY = "does not support empty tensors"
KEY_MASK = "does not support a dense mask"
NO_WINDOW = "does not support window"
NO_BIAS = "does not support alibi, relative_bias or segment_ids"
_FEATURES: dict[str, dict[str, str | None]] = {
    "plain": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "causal": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "one query, causal": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "more keys": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "more keys, causal": {"sdpa": TOP_LEFT, "flash": RUNS, "linear": RUNS},
    "more queries": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "more queries, causal": {"sdpa": TOP_LEFT, "flash": RUNS, "linear": RUNS},
    "key mask": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "key mask per head, GQA": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "key mask, causal": {"sdpa": NOT_BOTH, "flash": RUNS, "linear": RUNS},
    "bool mask": {"sdpa": RUNS, "flash": RUNS, "linear": KEY_MASK},
    "bool mask, causal": {"sdpa": NOT_BOTH, "flash": RUNS, "linear": KEY_MASK},
    "float mask": {"sdpa": RUNS, "flash": RUNS, "linear": "must be bool"},
    "float mask, fp32 for bf16": {"sdpa": RUNS, "flash": RUNS, "linear": "must be bool"},
    "float mask with gradient": {
        "sdpa": CONSTANT_MASK,
        "flash": RUNS,
        "linear": "must be bool",
    },
    "window": {"sdpa": NO_WINDOW, "flash": RUNS, "linear": FORGET},
    "window pair": {"sdpa": NO_WINDOW, "flash": RUNS, "linear": FORGET},
    "alibi": {"sdpa": NO_BIAS, "flash": RUNS, "linear": "alibi None"},
    "relative bias": {"sdpa": NO_BIAS, "flash": RUNS, "linear": "relative_bias None"},
    "segments": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "GQA": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "MQA": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "other value dim": {"sdpa": OTHER_DV, "flash": RUNS, "linear": RUNS},
    "dropout": {
        "sdpa": "does not support dropout on a CPU",
        "flash": RUNS,
        "linear": "does not support dropout",
    },
    "lse": {"sdpa": "does not support return_lse", "flash": RUNS, "linear": "return_lse"},
    "scale 0.3": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "no keys": {"sdpa": EMPTY, "flash": RUNS, "linear": RUNS},
    "no keys, causal": {"sdpa": TOP_LEFT, "flash": RUNS, "linear": RUNS},
    "no queries": {"sdpa": EMPTY, "flash": RUNS, "linear": RUNS},
    "no batch": {"sdpa": EMPTY, "flash": RUNS, "linear": RUNS},
    "head dim 264": {
        "sdpa": RUNS,
        "flash": "does not support head dimensions above 256",
        "linear": RUNS,
    },
    "fp64": {"sdpa": RUNS, "flash": "does not support torch.float64", "linear": RUNS},
    "no values": {"sdpa": OTHER_DV, "flash": RUNS, "linear": RUNS},
}

# `flash_linear` supports what `linear` does, except fp64.
NO_KERNEL = {"fp64": "does not support torch.float64"}
# `flash_shares` supports what `flash` does, except dropout and the gradient of a float mask.
NO_SHARES = {
    "float mask with gradient": CONSTANT_MASK,
    "dropout": "does not support dropout",
}
# `decode` supports what `flash` does, without gradients and dropout.
NO_GRADIENT = {
    "float mask with gradient": "does not support gradients",
    "dropout": "does not support dropout",
}
FEATURE_BACKENDS = {
    name: {
        **row,
        "flash_linear": NO_KERNEL.get(name, row["linear"]),
        "flash_shares": NO_SHARES.get(name, row["flash"]),
        "decode": NO_GRADIENT.get(name, row["flash"]),
    }
    for name, row in _FEATURES.items()
}

# Features that a variant does not support on any backend, because they have no meaning for it.
VARIANT_UNSUPPORTED: dict[str, tuple[tuple[str, ...], str]] = {
    "float mask": (NO_SCORE, "attn_mask must be bool"),
    "float mask, fp32 for bf16": (NO_SCORE, "attn_mask must be bool"),
    "float mask with gradient": (NO_SCORE, "attn_mask must be bool"),
    "alibi": (NO_SCORE, "alibi None"),
    "relative bias": (NO_SCORE, "relative_bias None"),
    "lse": (NO_LSE, "return_lse"),
}

# Test id -> (variant, parameters, backend, RUNS or the reason).
CONSTANT_STATISTICS = "does not support a gradient through the statistics"
ONLY_ORDER_2 = "only order 2 has a linear form"
PARAMETER_BACKENDS: dict[str, tuple[str, dict, str, str | None]] = {
    "taylor of order 4, linear": ("taylor", {"order": 4}, "linear", ONLY_ORDER_2),
    "taylor of order 2, linear": ("taylor", {"order": 2}, "linear", RUNS),
    "taylor of order 4, flash_linear": ("taylor", {"order": 4}, "flash_linear", ONLY_ORDER_2),
    "differentiable gain from statistics, sdpa": (
        "adaptive_temperature",
        {"differentiable": True},
        "sdpa",
        CONSTANT_STATISTICS,
    ),
    "gain from statistics, sdpa": (
        "adaptive_temperature",
        {"differentiable": False},
        "sdpa",
        RUNS,
    ),
    "differentiable gain from statistics, flash": (
        "adaptive_temperature",
        {"differentiable": True},
        "flash",
        CONSTANT_STATISTICS,
    ),
    "taylor of order 4, flash": ("taylor", {"order": 4}, "flash", RUNS),
    "taylor of order 6, flash": ("taylor", {"order": 6}, "flash", "has no Triton implementation"),
    "learned alpha per head": (
        "entmax",
        {"alpha": torch.full((2,), 1.3, requires_grad=True)},
        "flash",
        RUNS,
    ),
    "constant alpha per head": ("entmax", {"alpha": torch.full((2,), 1.3)}, "flash", RUNS),
}


def levels_of(variant: str, factors: dict[str, tuple], settings: bool = True) -> dict[str, tuple]:
    """The factors of a covering array, with only those levels that the variant supports."""
    case, levels = CASES[variant], dict(factors)
    params = ["default", *range(len(case.settings) if settings else 0)]
    params += ["learned"] if case.learned else []
    params += ["per_token"] if case.per_token else []
    levels["params"] = tuple(params)
    if variant in NO_SCORE:
        levels.update(mask=("none", "bool", "keys"), bias=(None,))
    if variant in NO_LSE:
        levels["lse"] = (False,)
    if variant in CAUSAL_ONLY and "span" in levels:
        levels["span"] = tuple(x for x in levels["span"] if x in ("causal", "window"))
    return levels
