"""Backends and variants support exactly what `coverage_table.py` lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnzoo
from attnzoo.backends import BACKENDS
from helpers.cases import (
    ALL_VARIANTS,
    CAUSAL_ONLY,
    MARKED,
    NO_LSE,
    NO_SCORE,
    VARIANTS,
    params_of,
)
from helpers.coverage_table import (
    FEATURE_BACKENDS,
    FIRST,
    FORWARD_ONLY,
    KERNELS,
    PARAMETER_BACKENDS,
    RUNS,
    VARIANT_BACKENDS,
    VARIANT_UNSUPPORTED,
    marked,
    pair,
)
from helpers.features import feature

LISTED = ("sdpa", "decode", "flash", "linear", "flash_linear", "flash_shares")


def check_shapes(arguments: dict[str, Any], variant: str, backend: str, **params: Any) -> None:
    """Run forward and backward, and check the shapes."""
    q, v = arguments["q"], arguments["v"]
    params = {**params_of(variant), **params}
    out = attnzoo.attention(variant=variant, backend=backend, **arguments, **params)
    out = out[0] if arguments.get("return_lse") else out
    assert out.shape == (*q.shape[:3], v.shape[-1])
    assert out.dtype == q.dtype
    assert bool(out.isfinite().all())
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(out.sum(), leaves) if leaves else ()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.shape == leaf.shape
        assert bool(gradient.isfinite().all())


def check(
    reason: str | None, arguments: dict[str, Any], variant: str, backend: str, **params: Any
) -> None:
    """Check that the call runs, or that both its error and `explain` give ``reason``."""
    plan = attnzoo.explain(
        variant=variant, backend=backend, **arguments, **{**params_of(variant), **params}
    )
    if reason is RUNS:
        check_shapes(arguments, variant, backend, **params)
        assert plan.chosen == backend
        return
    with pytest.raises(ValueError, match=reason):
        check_shapes(arguments, variant, backend, **params)
    assert plan.chosen is None
    assert reason in str(plan)


def test_tables_list_every_variant_and_backend() -> None:
    assert set(VARIANT_BACKENDS) == set(ALL_VARIANTS)
    columns = {*BACKENDS} - {"eager", "tiled"}
    assert columns == {*LISTED}
    assert all(set(row) == columns for row in VARIANT_BACKENDS.values())
    assert all(set(row) == columns for row in FEATURE_BACKENDS.values())
    assert set(VARIANT_UNSUPPORTED) <= set(FEATURE_BACKENDS)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        pair(variant, backend) if reason is RUNS else marked(variant, backend)
        for variant, reasons in VARIANT_BACKENDS.items()
        for backend, reason in reasons.items()
    ],
)
def test_variants_run_or_raise_as_listed(variant: str, backend: str) -> None:
    name = "causal" if variant in CAUSAL_ONLY else "plain"
    arguments = feature(name, gradient=backend not in FORWARD_ONLY)
    check(VARIANT_BACKENDS[variant][backend], arguments, variant, backend)


def runs() -> Iterator[Any]:
    """Yield each feature and supported pair of variant and backend.

    On Triton backends, there is one variant per normalization. All variants of a backend but one
    are marked slow.
    """
    for backend in LISTED:
        # Most features are not causal.
        variants = [v for v in VARIANTS if VARIANT_BACKENDS[v][backend] is RUNS]
        for variant in variants:
            if backend in KERNELS and variant not in FIRST.values():
                continue
            pair = marked(variant, backend)
            quick = "softmax" if "softmax" in variants else variants[0]
            for name, reasons in FEATURE_BACKENDS.items():
                # decode runs what flash runs, and flash_linear what linear runs.
                repeats = backend in ("decode", "flash_linear")
                known = repeats and reasons[backend] is RUNS and name not in REPEATED
                marks = [pytest.mark.slow] if variant != quick or known else []
                yield pytest.param(
                    name, *pair.values, marks=[*pair.marks, *marks], id=f"{name}-{pair.id}"
                )


REPEATED = ("plain", "causal", "key mask", "float mask", "GQA", "no keys")


@pytest.mark.parametrize(("name", "variant", "backend"), list(runs()))
def test_features_run_or_raise_as_listed(name: str, variant: str, backend: str) -> None:
    unsupported = name in VARIANT_UNSUPPORTED and variant in VARIANT_UNSUPPORTED[name][0]
    # If neither the variant nor the backend supports a feature, the error has the variant's reason.
    reason = VARIANT_UNSUPPORTED[name][1] if unsupported else FEATURE_BACKENDS[name][backend]
    gradient = backend not in FORWARD_ONLY or name.endswith("with gradient")
    check(reason, feature(name, gradient), variant, backend)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("variant", MARKED)
def test_eager_and_tiled_support_every_feature(variant: str, backend: str) -> None:
    for name in FEATURE_BACKENDS:
        unsupported = name in VARIANT_UNSUPPORTED and variant in VARIANT_UNSUPPORTED[name][0]
        check(
            VARIANT_UNSUPPORTED[name][1] if unsupported else RUNS, feature(name), variant, backend
        )


@pytest.mark.interpreter
@pytest.mark.parametrize("name", PARAMETER_BACKENDS)
def test_parameters_run_or_raise_as_listed(name: str) -> None:
    variant, params, backend, reason = PARAMETER_BACKENDS[name]
    check(reason, feature("plain"), variant, backend, **params)


@pytest.mark.parametrize("backend", [marked(name) for name in ("sdpa", "decode", "flash")])
def test_option_differentiable_is_accepted_if_no_input_requires_a_gradient(backend: str) -> None:
    arguments = feature("plain", gradient=False)
    plan = attnzoo.explain(
        variant="adaptive_temperature", backend=backend, differentiable=True, **arguments
    )
    assert plan.chosen == backend


def test_lists_of_unsupported_features_agree_with_the_variants() -> None:
    for variant in VARIANTS:
        assert (variant in NO_LSE) == (attnzoo.get_variant(variant).scores is None)
    assert set(NO_SCORE) <= set(NO_LSE)


@pytest.mark.parametrize("variant", MARKED)
def test_every_feature_runs_on_the_selected_backend(variant: str) -> None:
    for name in FEATURE_BACKENDS:
        if name in VARIANT_UNSUPPORTED and variant in VARIANT_UNSUPPORTED[name][0]:
            continue
        arguments = feature(name)
        plan = attnzoo.explain(variant=variant, **arguments, **params_of(variant))
        assert plan.chosen in BACKENDS
        check_shapes(arguments, variant, plan.chosen)
