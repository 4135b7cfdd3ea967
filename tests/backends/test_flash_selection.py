"""The kernel that finds the largest scores, by number or by weight.

All kernels of a call select the same keys. Where keys are selected by weight, tests assert that no
sum of weights is close to the border.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import tiles
from attnzoo.backends.triton.flash import operators as flash_ops
from attnzoo.backends.triton.flash.launch import config_of
from attnzoo.core import activations
from helpers.cases import rand
from helpers.crossed import crossed

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

ALL_KEYS = 2**31 - 1
slow = partial(pytest.param, marks=pytest.mark.slow)
MARGIN = 5e-6  # least distance of a sum of weights from the mass
LAYOUT = Layout(1.0, None, None, None, None, None, None)


def selected(
    s: Tensor, number: float, right: int | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The cut and the last key of each query, for scores s (queries, keys).

    number: how many keys are selected, an int, or the softmax weight that they reach, a float.
    """
    q = torch.ones(1, 1, s.shape[0], 8)
    k = torch.zeros(1, 1, s.shape[1], 8)
    bias = s[None, None] if mask is None else s[None, None].masked_fill(~mask, float("-inf"))
    layout = LAYOUT._replace(right=right, mask=bias.contiguous())
    solved = flash_ops.flash_solve(
        q=q, k=k, v=k, vectors=Vectors(), terms=Terms(), layout=layout,
        rule=Rule(activations.EXP, "select", **{"keep" if number >= 1 else "mass": number}),
    )  # fmt: skip
    assert solved.cut is not None
    assert solved.last is not None
    return solved.cut[0, 0], solved.last[0, 0]


def chosen(s: Tensor, number: float) -> Tensor:
    """The keys that the definition keeps, of those with a finite score; see `selected`."""
    ordered, order = s.double().sort(stable=True, dim=-1, descending=True)
    first = (torch.arange(s.shape[-1]) < number).expand(s.shape)
    if number < 1:
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[..., 0] = 0.0
        close = ((before - number).abs() < MARGIN) & (ordered > float("-inf"))
        assert not bool(close[..., 1:].any())
        first = before < number
    mask = torch.zeros_like(s, dtype=torch.bool)
    return mask.scatter(-1, order, first) & (s > float("-inf"))


def by_cut(s: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    cut, j = cut[:, None], torch.arange(s.shape[1])
    return ((s > cut) | ((s == cut) & (j <= last[:, None]))) & (s > float("-inf"))


# The masked scores of each query: far apart, in few values, with both zeros, and extreme.
def scores(kind: str) -> Tensor:
    s = rand(70, 90).float()
    if kind == "ties":
        return s.round()
    if kind == "zeros":
        return torch.where(s > 0.7, 1.0, torch.where(s > 0, 0.0, -0.0))
    if kind == "extreme":
        return s.sign() * 10.0 ** (20 * rand(70, 90, seed=1).float()).clamp(max=37)
    if kind == "near":
        return (1 + s * 2.0**-21).float()
    return s


@pytest.mark.parametrize(
    ("kind", "number"),
    crossed(
        ["ties", "apart", "zeros", "extreme", "near"],
        [0.83125, 1, slow(7), 200, 1e-46, slow(0.28925), 0.999742],
    ),
)
def test_selects_what_the_definition_keeps(kind: str, number: float) -> None:
    s = scores(kind).masked_fill(rand(70, 90, seed=2) > 1, float("-inf"))
    s[3], s[4, 5:] = float("-inf"), float("-inf")
    cut, last = selected(s, number)
    assert torch.equal(by_cut(s, cut, last), chosen(s, number))


def test_a_query_with_few_keys_has_no_cut_and_ties_end_at_a_key() -> None:
    s = torch.tensor([[1.0, 2.0, 3.0], [1.0, float("-inf"), float("-inf")], [2.0, 2.0, 2.0]])
    cut, last = selected(s, 2)
    assert 1.0 < float(cut[0]) <= 2.0
    assert cut[1:].tolist() == [float("-inf"), 2.0]
    assert last.tolist() == [ALL_KEYS, ALL_KEYS, 1]


def test_a_query_without_keys_has_no_cut_and_equal_weights_end_at_a_key() -> None:
    s = torch.tensor([[1.0, 2.0, 3.0], [float("-inf")] * 3, [2.0, 2.0, 2.0], [1.0, 1.0, 4.0]])
    cut, last = selected(s, 0.6)
    assert 2.0 < float(cut[0]) <= 3.0  # its softmax weight is 0.67
    assert cut[1:3].tolist() == [float("-inf"), 2.0]
    assert last.tolist() == [ALL_KEYS, ALL_KEYS, 1, ALL_KEYS]


@pytest.mark.parametrize("number", [3, 0.6])
def test_causality_counts_visible_keys_only(number: float) -> None:
    s = rand(70, 70).float().round()
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    cut, last = selected(s, number, right=0)
    seen = s.masked_fill(hidden, float("-inf"))
    assert torch.equal(by_cut(seen, cut, last), chosen(seen, number))


# ---- all kernels of a call ----------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, number: float, **options: Any) -> Tensor:
    if number < 1:
        return attnzoo.attention(q, k, v, "top_p", p=number, **options)
    return attnzoo.attention(q, k, v, "topk", top_k=number, **options)


def weights(q: Tensor, k: Tensor, number: float, **options: Any) -> tuple[Tensor, Tensor]:
    """The weights (heads, Nq, Nk) of the forward and of dV."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    size = max(q.shape[2], k.shape[2])
    v = torch.eye(k.shape[2], size, dtype=q.dtype).expand(1, k.shape[1], -1, -1)
    v = v.contiguous().requires_grad_()
    out = attend(q, k, v, number, backend="flash", **options)
    do = torch.eye(q.shape[2], size, dtype=q.dtype).expand(out.shape)
    (dv,) = torch.autograd.grad(out, v, do)
    return out.detach()[0, ..., : k.shape[2]], dv[0, ..., : q.shape[2]].mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)])
@pytest.mark.parametrize("dim", [16, slow(136)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 3.0}])
@pytest.mark.parametrize("number", [23, 0.83125])
def test_forward_and_backward_select_the_same_keys_among_ties(
    dtype: torch.dtype, dim: int, options: dict[str, Any], number: float
) -> None:
    """Seven different keys, ten times each, so that scores are rounded and yet tie."""
    q = rand(1, 1, 70, dim).to(dtype)
    k = rand(1, 1, 7, dim, seed=1).to(dtype).repeat(1, 1, 10, 1)
    forward, backward = weights(q, k, number, **options)
    # Not all products with k, which may round equal ones differently
    s = (q.double() @ k[..., :7, :].double().mT).repeat(1, 1, 1, 10) * dim**-0.5
    if options:
        s = 3 * torch.tanh(s / 3)
        s = s.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), float("-inf"))
    want = chosen(s[0, 0], number)
    assert torch.equal(forward[0] > 0, want)
    assert torch.equal(backward[0] > 0, want)


@pytest.mark.parametrize("bias", ["alibi", "table", "mask"])
@pytest.mark.parametrize("number", [6, 0.83125])
def test_terms_are_part_of_ties(bias: str, number: float) -> None:
    """Sums of different products and terms that are exact, and often equal."""
    q = rand(1, 2, 40, 16).round().float()
    k = rand(1, 2, 70, 16, seed=1).round().float()
    options: dict[str, Any] = {"scale": 0.25}
    if bias == "alibi":
        options["alibi"] = torch.tensor([0.25, 0.5])
    elif bias == "table":
        options["relative_bias"] = rand(2, 9, seed=2).round().float() / 4
    else:
        options["attn_mask"] = rand(1, 1, 40, 70, seed=3).round().float() / 4
    forward, backward = weights(q, k, number, **options)
    exact = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    v = torch.eye(70, dtype=torch.float64).expand(1, 2, 70, 70)
    softmax = attnzoo.attention(q.double(), k.double(), v, backend="eager", **exact)[0]
    want = chosen(softmax.log().flatten(0, 1), number).view_as(softmax)
    assert torch.equal(forward > 0, want)
    assert torch.equal(backward > 0, want)


@pytest.mark.parametrize("number", [4, 0.09])
def test_a_mask_of_the_lowest_number_keeps_the_first_keys(number: float) -> None:
    """A query whose keys all have it has the weights of equal scores."""
    mask = torch.full((1, 1, 40, 40), torch.finfo(torch.float32).min)
    q, k = rand(1, 1, 40, 16).float(), rand(1, 1, 40, 16).float()
    forward, backward = weights(q, k, number, attn_mask=mask)
    want = torch.zeros(1, 40, 40)
    want[..., :4] = 0.25
    assert torch.equal(forward, want)
    assert torch.equal(backward, want)


@pytest.mark.parametrize("number", [3, 0.6])
def test_nan_reaches_the_queries_that_see_it(number: float) -> None:
    q, k, v = (rand(1, 1, 70, 16, seed=i).float() for i in range(3))
    k[..., 40, 0] = float("nan")
    out = attend(q, k, v, number, is_causal=True, backend="flash")
    assert bool(out[..., :40, :].isfinite().all())
    assert bool(out[..., 40:, :].isnan().all())


SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (9, 4)},
    "mask": {"attn_mask": (rand(1, 3, 41, 53, seed=5) > 0) & (torch.arange(41) != 7)[:, None]},
    "bias": {"attn_mask": rand(1, 1, 41, 53, seed=6).float(), "softcap": 4.0},
    "sharp": {"scale": 3.0},
}


@pytest.mark.parametrize("p", [slow(1e-6), slow(0.28925), 0.83125, slow(0.999061)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_results_and_gradients_agree_with_the_definition(setting: str, p: float) -> None:
    options = {"enable_gqa": True, **SETTINGS[setting]}
    shapes, results = ((1, 3, 41, 16), (1, 1, 53, 16), (1, 1, 53, 8)), []
    leaves = [rand(*shape, seed=n).float() for n, shape in enumerate(shapes)]
    for backend, dtype in (("eager", torch.float64), ("flash", torch.float32)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in leaves]
        arguments = {
            n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for n, x in options.items()
        }
        if dtype == torch.float64:
            softmax = attnzoo.attention_weights(*inputs, **arguments)[0].detach()
            chosen(softmax.log().flatten(0, 1), p)  # asserts the margin
        out = attend(*inputs, p, backend=backend, **arguments)
        gradients = torch.autograd.grad(out, inputs, rand(*out.shape, seed=3).to(dtype))
        results.append([x.double() for x in (out.detach(), *gradients)])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-5)


def test_all_kernels_of_a_call_have_blocks_of_one_size() -> None:
    """Other blocks could round a score in another way, and the key would be dropped or kept."""
    rule = Rule(activations.EXP, "select", keep=3)
    kernels = ("selection", "forward", "dq", "dkdv", "dbias")
    dtypes = (torch.bfloat16, torch.float32)
    masked = LAYOUT._replace(mask=torch.zeros(1, 1, 64, 64))
    every = product((0, 80, 90, 100), dtypes, tiles.LIMITS, (LAYOUT, masked))
    for arch, dtype, dim, layout in every:
        q = torch.empty(1, 1, 64, dim, dtype=dtype)
        configs = {
            kernel: config_of(kernel, arch, q, q, layout, rule, Vectors(), Terms(), None)
            for kernel in kernels
        }
        assert len({(c.block_m, c.block_n, c.part, c.warps) for c in configs.values()}) == 1
        assert configs["dkdv"].block_n <= 32  # the gradient of a table takes no more keys
        assert configs["dkdv"].transposed
