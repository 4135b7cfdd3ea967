"""The choice of the backend: explain(), the order of preference, and user-defined variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import attnzoo
from attnzoo.backends import BACKENDS
from attnzoo.backends.selection import FEW_SCORES, FEWEST_SCORES, preference
from helpers.cases import ALL_VARIANTS, VARIANTS, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS

pytestmark = pytest.mark.usefixtures("own_registry")


def tensors(n: int, d: int = 64, heads: int = 8, gradient: bool = False) -> list[Tensor]:
    # The tensors are expanded from one number, because explain() reads only shapes.
    return [torch.zeros(1).expand(1, heads, n, d).requires_grad_(gradient) for _ in range(3)]


def chosen(variant: str, n: int, d: int = 64, gradient: bool = False, **options: Any) -> str | None:
    options = {**params_of(variant, n), **options}
    return attnzoo.explain(*tensors(n, d, gradient=gradient), variant, **options).chosen


def test_few_scores_run_on_eager_or_sdpa() -> None:
    few = int((FEW_SCORES / 8) ** 0.5)
    for variant in VARIANTS:
        fused = VARIANT_BACKENDS[variant]["sdpa"] is RUNS
        assert chosen(variant, few) == ("sdpa" if fused else "eager")
        assert chosen(variant, few + 1) != "eager"


def test_variant_with_statistics_runs_on_eager_for_very_few_scores() -> None:
    fewest = int((FEWEST_SCORES / 8) ** 0.5)
    assert chosen("adaptive_temperature", fewest) == "eager"
    assert chosen("adaptive_temperature", fewest + 1) == "sdpa"


def test_softmax_with_a_gain_runs_on_sdpa() -> None:
    for variant in ("softmax", "ssmax", "log_n", "adaptive_temperature"):
        assert chosen(variant, 1024, is_causal=True) == "sdpa"
        assert chosen(variant, 1024, is_causal=True, window=100) == "tiled"
    for variant in ("sigmoid", "entmax", "sparsemax", "asentmax", "sink", "topk", "top_p"):
        assert chosen(variant, 1024, is_causal=True) == "tiled"


def test_linear_runs_if_it_is_less_work() -> None:
    """At D = 64, taylor has 2145 features, so at short lengths `linear` needs more work."""
    for n, backend in ((1024, "tiled"), (4096, "tiled"), (8192, "tiled"), (65536, "linear")):
        # Cost per query: 128 n for `tiled`, and 3 · 2145 · 2 · 65 for `linear`, doubled in fp64.
        assert chosen("taylor", n, d=64) == backend
        assert (128 * n > 6 * 2145 * 2 * 65) == (backend == "linear")
    # Under causality a query sees half of the keys on average.
    assert chosen("taylor", 2048, d=64, is_causal=True) == "tiled"
    assert chosen("taylor", 1024, d=16) == "linear"
    assert chosen("cosformer", 1024) == "linear"
    assert chosen("cosformer", 1024, window=(5, 5)) == "tiled"  # linear does not support windows


def test_choice_does_not_depend_on_gradients() -> None:
    """Every chosen backend supports gradients, so requires_grad need not change the choice."""
    for variant in VARIANTS:
        for n in (64, 1024, 8192):
            assert chosen(variant, n) == chosen(variant, n, gradient=True)


def test_explain_lists_every_candidate_once() -> None:
    q, k, v = tensors(1024)
    for variant in VARIANTS:
        plan = attnzoo.explain(q, k, v, variant, **params_of(variant, 1024))
        pairs = [(c.backend, c.form.kind) for c in plan.candidates]
        assert len(set(pairs)) == len(pairs)
        assert {backend for backend, _ in pairs} == set(BACKENDS)
        assert pairs[-1][0] == "eager"  # eager comes last for a large call
    assert preference((), attnzoo.core.arguments.check_call(q, k, v)) == []


def test_printed_plan_has_one_reason_per_candidate() -> None:
    q, k, v = tensors(1024)
    text = str(attnzoo.explain(q, k, v, "taylor", is_causal=True, dropout_p=0.1))
    lines = text.splitlines()
    assert lines[0] == "taylor: tiled"
    rows = {tuple(line.split()[:2]): " ".join(line.split()[2:]) for line in lines[1:]}
    assert rows["tiled", "pairwise"] == "chosen"
    assert rows["eager", "definition"] == "supported"
    assert rows["linear", "linear"] == "does not support dropout (tiled does)"
    assert rows["sdpa", "pairwise"] == "supports only softmax with an optional gain per query"
    assert rows["flash", "pairwise"].startswith(("supported", "needs"))
    assert rows["decode", "pairwise"] == "does not support dropout (flash does)"


def test_explain_gives_reasons_for_unsupported_calls() -> None:
    q, k, v = tensors(64)
    plan = attnzoo.explain(q, k, v, "taylor", alibi=torch.zeros(8))
    assert plan.chosen is None
    assert "attn_mask must be bool" in str(plan)
    plan = attnzoo.explain(q, k, v, "taylor", backend="sdpa")
    assert plan.chosen is None
    assert str(plan).startswith("taylor: the named backend cannot run this call\n")
    assert "supports only softmax" in str(plan)
    plan = attnzoo.explain(q, k, v, "softmax", backend="tiled")
    assert plan.chosen == "tiled"


def test_explain_runs_nothing() -> None:
    """The scores of the explained call would take 32 TB in fp32."""
    assert chosen("softmax", 10**6, return_lse=True) == "tiled"


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_named_backend_is_the_one_that_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name, known in list(BACKENDS.items()):

        def record(*args: Any, name: str = name, original: Any = known.run) -> Any:
            ran.append(name)
            return original(*args)

        monkeypatch.setitem(BACKENDS, name, replace(known, run=record))
    q, k, v = rand(3, 1, 2, 5, 8).float().unbind()
    names = {"linear": "taylor", "flash_linear": "taylor", "flash_shares": "stick_breaking"}
    variant = names.get(backend, "softmax")
    attnzoo.attention(q, k, v, variant, is_causal=True, backend=backend)
    assert ran[0] == backend
    ran.clear()
    attnzoo.attention(q, k, v, variant, is_causal=True)
    assert ran[0] == attnzoo.explain(q, k, v, variant, is_causal=True).chosen


# ---- user-defined variants --------------------------------------------------------------------


def relu(q: Tensor, k: Tensor, call: Any, p: Any) -> Tensor:
    """Return the weights ReLU(z)^p / n."""
    z = (call.scores(q, k) + call.bias).relu()
    inside = torch.where(z > 0, z, 1.0) ** p * (z > 0)
    return (inside / call.counts.clamp(min=1)[..., None]).masked_fill(~call.visible, 0.0)


RELU = attnzoo.Variant(
    "own_relu",
    "ReLU(z)^p / n",
    "Wortsman et al. 2023, arXiv:2309.08586",
    relu,
    params=(attnzoo.Param("p", 1.0, doc="power", init=1.0),),
    normalized=False,
)


def test_variant_without_forms_supports_all_arguments_and_gradients() -> None:
    attnzoo.register_variant(RELU)
    assert "own_relu" in attnzoo.list_variants()
    assert attnzoo.get_variant("own_relu") is RELU
    q, k, v = rand(2, 4, 9, 8, seed=1), rand(2, 2, 11, 8, seed=2), rand(2, 2, 11, 5, seed=3)
    p = torch.tensor([1.0, 1.5, 2.0, 3.0]).double()
    leaves = [x.requires_grad_() for x in (q, k, v, p)]
    options = {
        "is_causal": True,
        "enable_gqa": True,
        "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4]).double(),
        "attn_mask": rand(2, 1, 9, 11, seed=4) > -1,
    }
    z = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    distance = (torch.arange(2, 11)[:, None] - torch.arange(11)).abs()
    z = (z - options["alibi"][:, None, None] * distance).relu()
    seen = options["attn_mask"] & torch.ones(9, 11, dtype=torch.bool).tril(2)
    w = torch.where(seen & (z > 0), z ** p[:, None, None], 0.0)
    w = w / seen.sum(-1, keepdim=True).clamp(min=1)
    expected = w @ v.repeat_interleave(2, 1)
    do = rand(2, 4, 9, 5, seed=5)
    gradients = torch.autograd.grad(expected, leaves, do)
    for backend in ("eager", "tiled"):
        out = attnzoo.attention(q, k, v, "own_relu", p=p, backend=backend, **options)
        assert torch.allclose(out, expected)
        for have, want in zip(torch.autograd.grad(out, leaves, do), gradients, strict=True):
            assert torch.allclose(have, want)
    for backend in ("sdpa", "flash", "linear", "flash_linear", "flash_shares"):
        with pytest.raises(ValueError, match=f"'{backend}' cannot run 'own_relu' here.*no .* form"):
            attnzoo.attention(q, k, v, "own_relu", backend=backend, **options)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_variant_without_forms_passes_gradcheck_in_small_blocks(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask, the ALiBi slopes and the parameters get gradients too."""
    from attnzoo.backends.tiled import blocks

    monkeypatch.setattr(blocks, "SCORES", 40)
    monkeypatch.setattr(blocks, "ROWS", 3)
    monkeypatch.setattr(blocks, "HEADS", 2)
    attnzoo.register_variant(RELU)
    leaves = [rand(2, 4, 5, 3, seed=1), rand(2, 2, 6, 3, seed=2), rand(2, 2, 6, 3, seed=3)]
    leaves += [torch.tensor([1.5, 2.0, 2.5, 3.0]).double(), rand(5, 6, seed=4)]
    leaves += [torch.tensor([0.1, 0.2, 0.3, 0.4]).double()]

    def attend(q: Tensor, k: Tensor, v: Tensor, p: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
        return attnzoo.attention(
            q, k, v, "own_relu", p=p, attn_mask=mask, alibi=slopes, enable_gqa=True,
            is_causal=True, backend=backend,
        )  # fmt: skip

    assert gradcheck(attend, [x.requires_grad_() for x in leaves], fast_mode=True)


def test_large_call_of_a_variant_without_forms_runs_on_tiled() -> None:
    attnzoo.register_variant(RELU)
    assert attnzoo.explain(*tensors(32), "own_relu").chosen == "eager"
    assert attnzoo.explain(*tensors(1024), "own_relu").chosen == "tiled"


def test_variant_with_scores_supports_return_lse() -> None:
    def scores(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return 2 * call.scores(q, k) + call.bias

    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return call.softmax(scores(q, k, call))

    attnzoo.register_variant(attnzoo.Variant("double", "softmax(2z)", "-", weights, scores=scores))
    q, k, v = rand(3, 1, 2, 6, 8).unbind()
    expected = (2 * q @ k.mT / 8**0.5).logsumexp(-1)
    for backend in ("eager", "tiled"):
        _, lse = attnzoo.attention(q, k, v, "double", return_lse=True, backend=backend)
        assert torch.allclose(lse, expected)


def test_module_learns_a_user_defined_variant() -> None:
    attnzoo.register_variant(RELU)
    module = attnzoo.nn.Attention("own_relu", 2)
    assert module.p.tolist() == [1.0, 1.0]
    q, k, v = rand(3, 1, 2, 6, 8, dtype=torch.float32).unbind()
    module(q, k, v).sum().backward()
    assert module.p.grad.abs().sum() > 0


def test_registering_does_not_leak_between_tests() -> None:
    assert attnzoo.list_variants() == ALL_VARIANTS
