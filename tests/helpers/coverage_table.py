"""What each backend may refuse, and each variant. A skip that is not written here is a failure.

Tests hold the tables both ways: what runs here must run, and what is refused must be refused in
these words. ``eager`` and ``tiled`` have no column: they refuse nothing that the contract allows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.cases import CASES, NO_LSE, NO_SCORE
from helpers.kernel_paths import Level, path_of

RUNS = None  # in the place of a reason

# Variant × backend, for a plain call.
NO_LINEAR = "no linear form"
NO_PAIRWISE = "no pairwise form"
NOT_SOFTMAX = "carries softmax and row gains on it only"
VARIANT_BACKENDS: dict[str, dict[str, str | None]] = {
    "adaptive_temperature": {
        "sdpa": RUNS,
        "flash": RUNS,
        "linear": NO_LINEAR,
        "flash_linear": NO_LINEAR,
    },
    "asentmax": {
        "sdpa": NOT_SOFTMAX,
        "flash": RUNS,
        "linear": NO_LINEAR,
        "flash_linear": NO_LINEAR,
    },
    "cosformer": {"sdpa": NO_PAIRWISE, "flash": NO_PAIRWISE, "linear": RUNS, "flash_linear": RUNS},
    "entmax": {"sdpa": NOT_SOFTMAX, "flash": RUNS, "linear": NO_LINEAR, "flash_linear": NO_LINEAR},
    "log_n": {"sdpa": RUNS, "flash": RUNS, "linear": NO_LINEAR, "flash_linear": NO_LINEAR},
    "sigmoid": {"sdpa": NOT_SOFTMAX, "flash": RUNS, "linear": NO_LINEAR, "flash_linear": NO_LINEAR},
    "sink": {"sdpa": "has no sink", "flash": RUNS, "linear": NO_LINEAR, "flash_linear": NO_LINEAR},
    "softmax": {"sdpa": RUNS, "flash": RUNS, "linear": NO_LINEAR, "flash_linear": NO_LINEAR},
    "sparsemax": {
        "sdpa": NOT_SOFTMAX,
        "flash": RUNS,
        "linear": NO_LINEAR,
        "flash_linear": NO_LINEAR,
    },
    "ssmax": {"sdpa": RUNS, "flash": RUNS, "linear": NO_LINEAR, "flash_linear": NO_LINEAR},
    "taylor": {"sdpa": NOT_SOFTMAX, "flash": RUNS, "linear": RUNS, "flash_linear": RUNS},
    "topk": {
        "sdpa": NOT_SOFTMAX,
        "flash": "selects no keys",
        "linear": NO_LINEAR,
        "flash_linear": NO_LINEAR,
    },
}

# The kernels for few rows take the forms that those for many do.
for _row in VARIANT_BACKENDS.values():
    _row["decode"] = _row["flash"]

FLASH = [variant for variant, row in VARIANT_BACKENDS.items() if row["flash"] is RUNS]
KERNELS = ("flash", "decode", "flash_linear")  # Triton's, which the interpreter runs
FORWARD_ONLY = ("decode",)


def backends_of(variant: str) -> list[str]:
    """Those that run a plain call."""
    table = VARIANT_BACKENDS[variant]
    return ["eager", "tiled", *(name for name in table if table[name] is RUNS)]


def cell(*values: str) -> Any:
    """Values of a test, which runs the interpreter if one of its backends is among them."""
    marks = [pytest.mark.interpreter] if {*KERNELS} & {*values} else []
    return pytest.param(*values, marks=marks, id="-".join(values))


# The variants in which a way to normalize comes first. On the kernels, in an interpreter, the
# others are slow.
_FIRST: dict[str, str] = {}
for _name in VARIANT_BACKENDS:
    _path = path_of(Level(_name, "default"), ("pairwise", "linear"))
    _FIRST.setdefault(_path.normalize, _name)


def pair(variant: str, backend: str) -> Any:
    found = cell(variant, backend)
    slow = backend in KERNELS and variant not in _FIRST.values()
    marks = [*found.marks, pytest.mark.slow] if slow else found.marks
    return pytest.param(*found.values, marks=marks, id=found.id)


# Every (variant, backend) that runs; and that trains.
PAIRS = [pair(variant, name) for variant in VARIANT_BACKENDS for name in backends_of(variant)]
TRAINED = [pair for pair in PAIRS if pair.values[1] not in FORWARD_ONLY]

# (variant, backend) whose learned parameters get no gradient there: the shape of an activation.
CONSTANT_PARAMETERS = tuple(
    (name, "flash")
    for name, row in VARIANT_BACKENDS.items()
    if row["flash"] is RUNS and CASES[name].learned
    if "shape" in path_of(Level(name, "learned")).learned
)


def precise(backend: str) -> torch.dtype:
    """The inputs in which a backend is most accurate."""
    return torch.float32 if backend in KERNELS else torch.float64


# Feature of a call × backend, for the variants that the backend runs. ``features.py`` builds them.
NOT_BOTH = "takes a mask or causality, not both"
CONSTANT_MASK = "no gradient for a float mask"
FORGET = "a state cannot forget"
DENSE = "would need a dense mask"
_FEATURES: dict[str, dict[str, str | None]] = {
    "plain": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "causal": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "one query, causal": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "more keys": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "more keys, causal": {"sdpa": "is top-left causal", "flash": RUNS, "linear": RUNS},
    "more queries": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "more queries, causal": {"sdpa": "is top-left causal", "flash": RUNS, "linear": RUNS},
    "key mask": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "key mask per head, GQA": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "key mask, causal": {"sdpa": NOT_BOTH, "flash": RUNS, "linear": RUNS},
    "bool mask": {"sdpa": RUNS, "flash": RUNS, "linear": "not a dense one"},
    "bool mask, causal": {"sdpa": NOT_BOTH, "flash": RUNS, "linear": "not a dense"},
    "float mask": {"sdpa": RUNS, "flash": RUNS, "linear": "must be bool"},
    "float mask, fp32 for bf16": {"sdpa": RUNS, "flash": RUNS, "linear": "must be bool"},
    "float mask with gradient": {
        "sdpa": CONSTANT_MASK,
        "flash": CONSTANT_MASK,
        "linear": "must be bool",
    },
    "window": {"sdpa": DENSE, "flash": RUNS, "linear": FORGET},
    "window pair": {"sdpa": DENSE, "flash": RUNS, "linear": FORGET},
    "alibi": {"sdpa": DENSE, "flash": RUNS, "linear": "alibi None"},
    "segments": {"sdpa": DENSE, "flash": RUNS, "linear": FORGET},
    "GQA": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "MQA": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "other value dim": {"sdpa": "Dv = D only", "flash": RUNS, "linear": RUNS},
    "dropout": {
        "sdpa": "no fused dropout on a CPU",
        "flash": "has no dropout",
        "linear": "no weights to drop",
    },
    "lse": {"sdpa": "does not return lse", "flash": RUNS, "linear": "return_lse"},
    "scale 0.3": {"sdpa": RUNS, "flash": RUNS, "linear": RUNS},
    "no keys": {"sdpa": "does not take empty tensors", "flash": RUNS, "linear": RUNS},
    "no keys, causal": {"sdpa": "is top-left causal", "flash": RUNS, "linear": RUNS},
    "no queries": {"sdpa": "does not take empty tensors", "flash": RUNS, "linear": RUNS},
    "no batch": {"sdpa": "does not take empty tensors", "flash": RUNS, "linear": RUNS},
    "head dim 264": {
        "sdpa": RUNS,
        "flash": "head dimensions up to 256",
        "linear": RUNS,
    },
    "fp64": {"sdpa": RUNS, "flash": "not torch.float64", "linear": RUNS},
    "no values": {"sdpa": "Dv = D only", "flash": RUNS, "linear": RUNS},
}

# The kernels of linear forms take what the scan takes, but for fp64.
NO_KERNEL = {"fp64": "not torch.float64"}
# Those for few rows take what `flash` takes, without gradients.
FEATURE_BACKENDS = {
    name: {**row, "flash_linear": NO_KERNEL.get(name, row["linear"]), "decode": row["flash"]}
    for name, row in _FEATURES.items()
}

# Feature × variants which refuse it on every backend: the feature has no meaning for them.
VARIANT_REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "float mask": (NO_SCORE, "attn_mask must be bool"),
    "float mask, fp32 for bf16": (NO_SCORE, "attn_mask must be bool"),
    "float mask with gradient": (NO_SCORE, "attn_mask must be bool"),
    "alibi": (NO_SCORE, "alibi None"),
    "lse": (NO_LSE, "return_lse"),
}

# Parameter of a variant × backend.
PARAMETER_BACKENDS: dict[str, tuple[str, dict, str, str | None]] = {
    "taylor of order 4": ("taylor", {"order": 4}, "linear", "only order 2 has a linear form"),
    "taylor of order 2": ("taylor", {"order": 2}, "linear", RUNS),
    "taylor of order 4, in chunks": (
        "taylor",
        {"order": 4},
        "flash_linear",
        "only order 2 has a linear form",
    ),
    "gain through statistics": (
        "adaptive_temperature",
        {"differentiable": True},
        "sdpa",
        "takes the gain as a constant",
    ),
    "gain from statistics": (
        "adaptive_temperature",
        {"differentiable": False},
        "sdpa",
        RUNS,
    ),
    "gain through statistics, flash": (
        "adaptive_temperature",
        {"differentiable": True},
        "flash",
        "takes the gain as a constant",
    ),
    "taylor of order 4, flash": ("taylor", {"order": 4}, "flash", RUNS),
    "taylor of order 6, flash": ("taylor", {"order": 6}, "flash", "names no Triton function"),
    "learned alpha": (
        "entmax",
        {"alpha": torch.full((2,), 1.3, requires_grad=True)},
        "flash",
        "gives no gradient for the shape",
    ),
    "alpha per head": ("entmax", {"alpha": torch.full((2,), 1.3)}, "flash", RUNS),
}


def levels_of(
    variant: str, factors: dict[str, tuple], settings: bool = True, learned: str = "learned"
) -> dict[str, tuple]:
    """The factors of a covering array, with the parameters, masks and outputs of the variant."""
    case, levels = CASES[variant], dict(factors)
    params = ["default", *range(len(case.settings) if settings else 0)]
    params += [learned] if case.learned else []
    params += ["per_token"] if case.per_token else []
    levels["params"] = tuple(params)
    if variant in NO_SCORE:
        levels.update(mask=("none", "bool", "keys"), alibi=(False,))
    if variant in NO_LSE:
        levels["lse"] = (False,)
    return levels
