"""What each backend may refuse, and each variant. A skip that is not written here is a failure.

Tests hold the tables both ways: what runs here must run, and what is refused must be refused in
these words. ``eager`` and ``tiled`` have no column: they refuse nothing that the contract allows.
"""

from __future__ import annotations

RUNS = None  # in the place of a reason

# Variant × backend, for a plain call.
NO_LINEAR = "no linear form"
NO_PAIRWISE = "no pairwise form"
NOT_SOFTMAX = "carries softmax and row gains on it only"
VARIANT_BACKENDS: dict[str, dict[str, str | None]] = {
    "adaptive_temperature": {"sdpa": RUNS, "linear": NO_LINEAR},
    "asentmax": {"sdpa": NOT_SOFTMAX, "linear": NO_LINEAR},
    "cosformer": {"sdpa": NO_PAIRWISE, "linear": RUNS},
    "entmax": {"sdpa": NOT_SOFTMAX, "linear": NO_LINEAR},
    "log_n": {"sdpa": RUNS, "linear": NO_LINEAR},
    "sigmoid": {"sdpa": NOT_SOFTMAX, "linear": NO_LINEAR},
    "sink": {"sdpa": "has no sink", "linear": NO_LINEAR},
    "softmax": {"sdpa": RUNS, "linear": NO_LINEAR},
    "sparsemax": {"sdpa": NOT_SOFTMAX, "linear": NO_LINEAR},
    "ssmax": {"sdpa": RUNS, "linear": NO_LINEAR},
    "taylor": {"sdpa": NOT_SOFTMAX, "linear": RUNS},
    "topk": {"sdpa": NOT_SOFTMAX, "linear": NO_LINEAR},
}


def backends_of(variant: str) -> list[str]:
    """Those that run a plain call."""
    table = VARIANT_BACKENDS[variant]
    return ["eager", "tiled", *(name for name in table if table[name] is RUNS)]


# Feature of a call × backend, for the variants that the backend runs. ``features.py`` builds them.
FORGET = "a state cannot forget"
DENSE = "would need a dense mask"
FEATURE_BACKENDS: dict[str, dict[str, str | None]] = {
    "plain": {"sdpa": RUNS, "linear": RUNS},
    "causal": {"sdpa": RUNS, "linear": RUNS},
    "one query, causal": {"sdpa": RUNS, "linear": RUNS},
    "more keys": {"sdpa": RUNS, "linear": RUNS},
    "more keys, causal": {"sdpa": "is top-left causal", "linear": RUNS},
    "more queries": {"sdpa": RUNS, "linear": RUNS},
    "more queries, causal": {"sdpa": "is top-left causal", "linear": RUNS},
    "key mask": {"sdpa": RUNS, "linear": RUNS},
    "key mask per head, GQA": {"sdpa": RUNS, "linear": RUNS},
    "key mask, causal": {"sdpa": "takes a mask or causality, not both", "linear": RUNS},
    "bool mask": {"sdpa": RUNS, "linear": "not a dense one"},
    "bool mask, causal": {"sdpa": "takes a mask or causality, not both", "linear": "not a dense"},
    "float mask": {"sdpa": RUNS, "linear": "must be bool"},
    "float mask, fp32 for bf16": {"sdpa": RUNS, "linear": "must be bool"},
    "float mask with gradient": {"sdpa": "no gradient for a float mask", "linear": "must be bool"},
    "window": {"sdpa": DENSE, "linear": FORGET},
    "window pair": {"sdpa": DENSE, "linear": FORGET},
    "alibi": {"sdpa": DENSE, "linear": "alibi None"},
    "segments": {"sdpa": DENSE, "linear": FORGET},
    "GQA": {"sdpa": RUNS, "linear": RUNS},
    "MQA": {"sdpa": RUNS, "linear": RUNS},
    "other value dim": {"sdpa": "Dv = D only", "linear": RUNS},
    "dropout": {"sdpa": "no fused dropout on a CPU", "linear": "no weights to drop"},
    "lse": {"sdpa": "does not return lse", "linear": "return_lse"},
    "scale 0.3": {"sdpa": RUNS, "linear": RUNS},
    "no keys": {"sdpa": "does not take empty tensors", "linear": RUNS},
    "no keys, causal": {"sdpa": "is top-left causal", "linear": RUNS},
    "no queries": {"sdpa": "does not take empty tensors", "linear": RUNS},
    "no batch": {"sdpa": "does not take empty tensors", "linear": RUNS},
    "no values": {"sdpa": "Dv = D only", "linear": RUNS},
}

# Feature × variants which refuse it on every backend: the feature has no meaning for them.
NO_SCORE = ("cosformer", "taylor")
NO_LSE = ("asentmax", "cosformer", "entmax", "sigmoid", "sparsemax", "taylor")
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
}
