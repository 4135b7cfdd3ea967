"""The contract of a call (masks, counts, empty rows, extremes) for every shipped variant."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import Pairwise
from attnzoo.core.arguments import check_call
from attnzoo.core.parameters import bind
from helpers.cases import ALL_VARIANTS, CASES, NO_LSE, NO_SCORE, VARIANTS, learned, params_of, rand
from helpers.coverage_table import PAIRS, TRAINED, VARIANT_BACKENDS, precise
from helpers.crossed import crossed
from scripts.variant_facts import module_of

every_variant = pytest.mark.parametrize("variant", VARIANTS)


every_pair = pytest.mark.parametrize(("variant", "backend"), PAIRS)
# The backend decode launches several kernels per prefix length, so its pairs are marked slow.
PREFIX_PAIRS = [
    pytest.param(*pair.values, marks=[*pair.marks, pytest.mark.slow], id=pair.id)
    if pair.values[1] == "decode"
    else pair
    for pair in PAIRS
]
every_trained_pair = pytest.mark.parametrize(("variant", "backend"), TRAINED)


def qkv(queries: int = 7, keys: int = 7, seed: int = 0, dtype: Any = torch.float64) -> list[Tensor]:
    """Return random q, k and v with B = 2, H = 2, D = 6 and Dv = 6."""
    shapes = (queries, keys, keys)
    return [rand(2, 2, n, 6, seed=seed + i, dtype=dtype) for i, n in enumerate(shapes)]


def leaves_of(variant: str) -> dict[str, Tensor]:
    """Return learned parameters that require a gradient."""
    return {name: x.requires_grad_() for name, x in learned(variant, 2).items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b, with values of about 1, are equal up to rounding."""
    return torch.allclose(a, b, rtol=0, atol=1e-12 if a.dtype == torch.float64 else 5e-6)


def gradients_of(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


# ---- documentation ----------------------------------------------------------------------------


def test_every_variant_has_a_test_case() -> None:
    assert set(CASES) == set(ALL_VARIANTS) == set(VARIANT_BACKENDS)


HEADINGS = ("Formula", "Effect", "Initial values", "Source", "Differences", "Notes")


def paragraphs(module: str) -> dict[str, str]:
    """Map each heading of a variant's docstring to its paragraph."""
    summary, *texts = (sys.modules[module].__doc__ or "").strip().split("\n\n")
    by_heading = {"Summary": summary}
    for text in texts:
        heading, _, body = text.partition(":")
        assert heading not in by_heading
        by_heading[heading] = body.strip()
    return by_heading


@every_variant
def test_module_docstring_has_the_documented_paragraphs(variant: str) -> None:
    definition = attnzoo.get_variant(variant)
    module = module_of(definition)
    assert module == f"attnzoo.variants.{variant}"  # one file per variant, of the same name
    text = paragraphs(module)
    assert text["Summary"].startswith(f"{variant}: ")
    assert text["Summary"].endswith(".")
    assert "\n" not in text["Summary"]
    assert [name for name in HEADINGS if name in text] == list(text)[1:]
    assert {"Formula", "Effect", "Source"} <= set(text)
    assert ("Initial values" in text) <= bool(definition.params)
    assert all(text.values())
    for year in [word for word in definition.paper.replace(",", " ").split() if word.isdigit()]:
        assert year in text["Source"]
    assert set(re.findall(r"arXiv:\S+\b", definition.paper)) <= set(
        re.findall(r"arXiv:\S+\b", text["Source"])
    )


@every_variant
def test_fields_for_tables_are_filled(variant: str) -> None:
    definition = attnzoo.get_variant(variant)
    assert definition.formula
    assert definition.paper
    assert definition.use.endswith(".")
    assert len(definition.use) <= 100
    for param in definition.params:
        assert param.name.isidentifier()
        assert len(param.doc.split()) > 3
        if param.kind == "per_head":
            assert "(H,)" in param.doc
        assert ("(B, H, Nq)" in param.doc) == param.per_token


def test_test_cases_list_all_learnable_parameters() -> None:
    for name, case in CASES.items():
        per_head = {p.name for p in attnzoo.get_variant(name).params if p.kind == "per_head"}
        assert set(case.learned) == per_head, name
        per_token = any(p.per_token for p in attnzoo.get_variant(name).params)
        assert case.per_token == per_token, name


@every_variant
def test_length_gain_is_true_exactly_if_the_gain_differs_between_causal_rows(variant: str) -> None:
    definition = attnzoo.get_variant(variant)
    call = check_call(*qkv(), is_causal=True)
    params = bind(definition, call, {**params_of(variant, 7), **learned(variant, 2)})
    gains = [form.gain for form in definition.forms(call, **params) if isinstance(form, Pairwise)]
    rows = [gain.expand(2, 2, 7) for gain in gains if isinstance(gain, Tensor)]
    differs = any(float((x - x[..., :1]).abs().max()) > 0 for x in rows)
    assert definition.length_gain == differs


def test_unknown_variant_error_suggests_a_name_or_lists_all() -> None:
    q, k, v = qkv()
    with pytest.raises(
        ValueError, match="'softmaxx'; did you mean 'softmax'\\? attnzoo.list_varia"
    ):
        attnzoo.attention(q, k, v, "softmaxx")
    with pytest.raises(ValueError, match="'other'; known: .*entmax.*softmax.*topk"):
        attnzoo.attention(q, k, v, "other")


@every_variant
def test_unknown_parameter_error_lists_the_known_ones(variant: str) -> None:
    q, k, v = qkv()
    names = [param.name for param in attnzoo.get_variant(variant).params] or ["none"]
    with pytest.raises(TypeError, match=f"'nonsense'.*{names[-1]}"):
        attnzoo.attention(q, k, v, variant, **{**params_of(variant), "nonsense": 1})


# ---- weights ----------------------------------------------------------------------------------


@every_variant
def test_weights_of_masked_keys_are_exactly_zero(variant: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    mask = rand(2, 2, 7, 7, seed=9) > 0
    for params in ({}, *CASES[variant].settings):
        params = {**params_of(variant), **params}
        w = attnzoo.attention_weights(q, k, v, variant, attn_mask=mask, is_causal=True, **params)
        hidden = ~(mask & torch.ones(7, 7, dtype=torch.bool).tril())
        assert torch.equal(w[hidden], torch.zeros(int(hidden.sum())))
        assert bool((w[~hidden] >= CASES[variant].least).all())


@every_variant
def test_rows_sum_to_one_if_normalized(variant: str) -> None:
    q, k, v = qkv(queries=9)  # if causal, the first Nq − Nk = 2 rows see no key
    params = {"lssa": {"eps": 1.0}}.get(variant, params_of(variant))  # its default shows rarely
    sums = attnzoo.attention_weights(q, k, v, variant, is_causal=True, **params).sum(-1)
    if variant == "cosformer":  # rows without a positive product have weights 0
        products = (q.relu() @ k.relu().transpose(-1, -2)).tril(-2).sum(-1)
        assert torch.allclose(sums, (products > 0).double())
        return
    assert torch.equal(sums[..., :2], torch.zeros(2, 2, 2, dtype=torch.float64))
    if attnzoo.get_variant(variant).normalized:
        assert torch.allclose(sums[..., 2:], torch.ones(2, 2, 7, dtype=torch.float64))
    else:
        assert bool(((sums[..., 2:] - 1).abs() > 1e-3).any())


@every_variant
def test_has_state_is_true_exactly_with_a_linear_form(variant: str) -> None:
    definition, (q, k, v) = attnzoo.get_variant(variant), qkv()
    defaults = {param.name: param.default for param in definition.params}
    for setting in ({}, learned(variant, 2), *CASES[variant].settings):
        params = {**params_of(variant), **setting}
        plan = attnzoo.explain(q, k, v, variant, is_causal=True, **params)
        linear = any(isinstance(x.form, attnzoo.Linear) for x in plan.candidates)
        assert definition.has_state(**{**defaults, **params}) == linear


@every_variant
def test_output_is_weights_times_values(variant: str) -> None:
    q, k, v = qkv()
    params = {**params_of(variant), **learned(variant, 2)}
    w = attnzoo.attention_weights(q, k, v, variant, is_causal=True, **params)
    out = attnzoo.attention(q, k, v, variant, is_causal=True, **params)
    assert torch.allclose(out, w @ v)


@pytest.mark.parametrize(("variant", "backend"), PREFIX_PAIRS)
def test_prefix_keeps_its_outputs(variant: str, backend: str) -> None:
    """Appending tokens under causality does not change earlier outputs."""
    q, k, v = qkv(queries=32, keys=32, dtype=precise(backend))
    options = {"is_causal": True, "backend": backend, **params_of(variant)}
    full = attnzoo.attention(q, k, v, variant, **options)
    for n in (1, 2, 17, 31):
        part = attnzoo.attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], variant, **options)
        assert same(part, full[:, :, :n])


@every_pair
def test_last_query_alone_gives_the_last_row(variant: str, backend: str) -> None:
    q, k, v = qkv(queries=12, keys=12, dtype=precise(backend))
    options = {"is_causal": True, "backend": backend, **params_of(variant)}
    full = attnzoo.attention(q, k, v, variant, **options)
    last = attnzoo.attention(q[:, :, -1:], k, v, variant, **options)
    assert same(last, full[:, :, -1:])


@every_pair
def test_order_of_keys_matters_only_if_positional(variant: str, backend: str) -> None:
    q, k, v = qkv(dtype=precise(backend))
    order = torch.tensor([3, 0, 6, 5, 1, 4, 2])
    mask = rand(1, 1, 1, 7, seed=9) > -0.5
    params = params_of(variant)
    one = attnzoo.attention(q, k, v, variant, attn_mask=mask, backend=backend, **params)
    k, v, mask = k[:, :, order], v[:, :, order], mask[..., order]
    two = attnzoo.attention(q, k, v, variant, attn_mask=mask, backend=backend, **params)
    assert same(one, two) != attnzoo.get_variant(variant).positional


@every_pair
def test_inputs_are_not_modified(variant: str, backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    before = [x.clone() for x in (q, k, v)]
    attnzoo.attention(q, k, v, variant, backend=backend, **params_of(variant))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


@every_pair
def test_default_dtype_does_not_matter(variant: str, backend: str) -> None:
    """Code that multiplies a bool tensor by a Python float would get the default dtype."""
    options = {"is_causal": True, "backend": backend, **params_of(variant)}
    q, k, v = qkv(dtype=precise(backend))
    before = attnzoo.attention(q, k, v, variant, **options)
    torch.set_default_dtype(torch.bfloat16)  # as transformers does while loading
    try:
        after = attnzoo.attention(q, k, v, variant, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, after)


# ---- rows with no or one visible key ----------------------------------------------------------


@every_trained_pair
def test_rows_without_keys_are_zero_with_zero_gradient(variant: str, backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1] = False  # no row of the second batch element sees a key
    leaves = [x.requires_grad_() for x in (q, k, v)]
    params = leaves_of(variant)
    out = attnzoo.attention(
        q, k, v, variant, attn_mask=mask, backend=backend, **{**params_of(variant), **params}
    )
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    gradients = gradients_of(out.sum(), [*leaves, *params.values()])
    for gradient in gradients:
        assert bool(gradient.isfinite().all())
    for gradient in gradients[:3]:
        assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    # In a call with only the second batch element, all gradients are zero.
    q, k, v = (x[1:] for x in leaves)
    out = attnzoo.attention(
        q, k, v, variant, attn_mask=mask[1:], backend=backend, **{**params_of(variant), **params}
    )
    out.sum().backward()
    for leaf in (*leaves, *params.values()):
        assert not leaf.requires_grad or torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("float_mask", [False, True])
@every_variant
def test_empty_row_does_not_change_the_others(variant: str, float_mask: bool, backend: str) -> None:
    """All rows but the empty one have the outputs and gradients of a call without that row."""
    if float_mask and variant in NO_SCORE:
        q, k, v = qkv()
        with pytest.raises(ValueError, match="bool"):
            attnzoo.attention(q, k, v, variant, attn_mask=q @ q.mT, **params_of(variant))
        return
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = rand(7, 7, seed=9) > -0.3
    mask[:, 0] = True
    mask[4] = False
    attn_mask = mask
    if float_mask:
        attn_mask = torch.zeros(7, 7, dtype=torch.float64).masked_fill(~mask, float("-inf"))
        attn_mask.requires_grad_()
    params = params_of(variant)
    out = attnzoo.attention(q, k, v, variant, attn_mask=attn_mask, backend=backend, **params)
    assert torch.equal(out[:, :, 4], torch.zeros(2, 2, 6, dtype=torch.float64))
    do = rand(2, 2, 7, 6, seed=8)
    gradients = torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
    assert torch.equal(gradients[0][:, :, 4], torch.zeros(2, 2, 6, dtype=torch.float64))
    others = [0, 1, 2, 3, 5, 6]
    if attnzoo.get_variant(variant).by_position:
        assert all(bool(x.isfinite().all()) for x in gradients)
        return
    less = attnzoo.attention(q[:, :, others], k, v, variant, attn_mask=mask[others], **params)
    expected = torch.autograd.grad(less, (q, k, v), do[:, :, others])
    for have, want in zip(gradients, expected, strict=True):
        assert torch.allclose(have, want)
    if float_mask:
        gradient = torch.autograd.grad(out, attn_mask, do)[0]
        assert torch.equal(gradient[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))


@every_trained_pair
def test_row_with_one_key_has_weight_one_and_finite_gradients(variant: str, backend: str) -> None:
    """Only normalized variants must have weight 1. At n = 1, gains proportional to log n are 0."""
    q, k, v = (x.abs().requires_grad_() for x in qkv(dtype=torch.float32))
    params = leaves_of(variant)
    options = {"is_causal": True, "backend": backend, **params_of(variant)}
    out = attnzoo.attention(q, k, v, variant, **options, **params)
    if attnzoo.get_variant(variant).normalized:
        assert torch.allclose(out[:, :, 0], v[:, :, 0])
    gradients = gradients_of(out[:, :, 0].sum(), [q, k, v, *params.values()])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    if attnzoo.get_variant(variant).normalized:
        # The weight is 1 for any score, so only v has a gradient.
        for gradient in (*gradients[:2], *gradients[3:]):
            assert float(gradient.abs().max()) < 1e-5


# ---- extreme scores ---------------------------------------------------------------------------

EXTREME = {
    "all −200": lambda z: torch.full_like(z, -200.0),
    "all +80": lambda z: torch.full_like(z, 80.0),
    "−200 and +80": lambda z: torch.where(z > 0, 80.0, -200.0),
    "of size 1e4": lambda z: 1e4 * z,
}


@pytest.mark.parametrize(("variant", "backend", "kind"), crossed(TRAINED, EXTREME))
def test_extreme_scores_stay_finite(variant: str, backend: str, kind: str) -> None:
    """In fp32, outputs and gradients are finite, and outputs agree with those in fp64."""
    z = EXTREME[kind](rand(1, 2, 6, 9, seed=3, dtype=torch.float32))
    # The keys are unit vectors with D = 9, so the scores equal the queries.
    q, k = z, torch.eye(9).expand(1, 2, 9, 9)
    v = rand(1, 2, 9, 9, seed=4, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    params = leaves_of(variant)
    options = {"scale": 1.0, "backend": backend, **params_of(variant)}
    with_lse = variant not in NO_LSE and backend != "sdpa"
    result = attnzoo.attention(*leaves, variant, return_lse=with_lse, **options, **params)
    out, lse = result if with_lse else (result, torch.zeros(()))
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    loss = (out * out.detach()).sum() + lse.sum()
    for gradient in gradients_of(loss, [*leaves, *params.values()]):
        assert bool(gradient.isfinite().all())
    exact = attnzoo.attention_weights(
        *(x.detach().double() for x in leaves),
        variant,
        scale=1.0,
        **params_of(variant),
        **{name: x.detach().double() for name, x in params.items()},
    )
    # A score of 1e4 has an error of 1e-3 in fp32.
    tolerance = 1e-2 if "1e4" in kind else 1e-4
    weight_sum = exact.sum(-1, keepdim=True).clamp(min=1)
    wrong = (out.double() - exact @ v.double()).abs() > tolerance * weight_sum
    assert not bool(wrong.any())
