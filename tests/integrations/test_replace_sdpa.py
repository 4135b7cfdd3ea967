"""replace_sdpa() redirects torch's scaled_dot_product_attention to a variant."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

import attnzoo
from attnzoo import replace_sdpa
from helpers.cases import rand
from helpers.errors import raising

Attend = Callable[..., Tensor]


def by_attribute(*args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **options)


class Block(nn.Module):
    """A block of nanoGPT if ``causal``, otherwise one of timm's VisionTransformer."""

    def __init__(self, attend: Attend, causal: bool) -> None:
        super().__init__()
        self.attend, self.causal = attend, causal
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        if self.causal:
            y = self.attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        else:
            y = self.attend(q, k, v, dropout_p=0.0)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, attend: Attend, depth: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(10, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(*[Block(attend, causal=True) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.tokens(x) + self.positions.weight) @ self.tokens.weight.mT


class ViT(nn.Module):
    def __init__(self, attend: Attend, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(rand(1, 1, 16).float())
        self.blocks = nn.Sequential(*[Block(attend, causal=False) for _ in range(depth)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])


def model(kind: type[GPT | ViT], attend: Attend, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return kind(attend, depth).double()


def inputs(kind: type[GPT | ViT]) -> Tensor:
    return torch.arange(24).view(2, 12) % 10 if kind is GPT else rand(2, 3, 16, 16)


def qkv(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [rand(*shape, seed=seed, dtype=dtype) for seed in range(3)]


def allclose(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "call"), [(GPT, by_attribute), (ViT, scaled_dot_product_attention)]
)
@pytest.mark.parametrize("variant", ["softmax", "ssmax", "entmax", "sigmoid"])
def test_models_compute_the_variant(kind: type[GPT | ViT], variant: str, call: Attend) -> None:
    host, expected = model(kind, call), model(kind, partial(attnzoo.attention, variant=variant))
    x = inputs(kind)
    before = host(x)
    with replace_sdpa(variant) as entered:
        out = host(x)
    assert entered.calls == 2
    for net, y in ((host, out), (expected, expected(x))):
        y.sin().sum().backward()
        assert allclose(y, out)
        assert all(p.grad is not None for p in net.parameters())
    for p, like in zip(host.parameters(), expected.parameters()):
        assert p.grad is not None
        assert like.grad is not None
        assert allclose(p.grad, like.grad)
    assert torch.equal(host(x), before)
    assert allclose(before, out) == (variant == "softmax")


def test_parameters_per_head_get_gradients() -> None:
    gains = [torch.linspace(0.2, 0.5, 4, dtype=torch.float64).requires_grad_() for _ in range(2)]
    host = model(GPT, scaled_dot_product_attention)
    with replace_sdpa("ssmax", s=gains[0], b=0.1):
        host(inputs(GPT)).sin().sum().backward()
    like = model(GPT, partial(attnzoo.attention, variant="ssmax", s=gains[1], b=0.1))
    like(inputs(GPT)).sin().sum().backward()
    assert gains[0].grad is not None
    assert gains[1].grad is not None
    assert gains[0].grad.count_nonzero() == 4
    assert allclose(gains[0].grad, gains[1].grad)


SHAPES = {
    "2-D": ((5, 8), (7, 8), (7, 6)),
    "3-D": ((2, 5, 8), (2, 7, 8), (2, 7, 6)),
    "3-D, one query batch": ((1, 5, 8), (3, 7, 8), (3, 7, 8)),
    "4-D": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "4-D, one key head": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "of unlike dimensions": ((5, 8), (2, 3, 7, 8), (7, 8)),
    "5-D, broadcast": ((2, 2, 3, 5, 8), (2, 1, 3, 7, 8), (1, 2, 3, 7, 8)),
    "6-D": ((2, 2, 2, 3, 5, 8), (2, 2, 2, 3, 7, 8), (2, 2, 2, 3, 7, 8)),
    "no batch": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_and_masks_are_those_of_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (rand(*shape, seed=seed) for seed, shape in enumerate(shapes))
    scores = (q @ k.mT).shape
    masks: list[Tensor | None] = [None]
    for shape in (scores, scores[-2:], (*[1] * (len(scores) - 1), scores[-1])):
        bias = rand(*shape, seed=3)
        masks += [bias, (bias < 0.5).index_fill(-1, torch.tensor([0]), True)]
    for mask in masks:
        expected = scaled_dot_product_attention(q, k, v, mask, scale=0.7)
        with replace_sdpa("softmax"):
            assert allclose(scaled_dot_product_attention(q, k, v, mask, scale=0.7), expected)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_grouped_heads(leading: tuple[int, ...]) -> None:
    q, k, v = rand(*leading, 4, 5, 8), *qkv(*leading, 2, 5, 8)[1:]
    options = {"is_causal": True, "enable_gqa": True}
    expected = scaled_dot_product_attention(q, k, v, **options)
    gains = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with replace_sdpa("softmax"):
        assert allclose(scaled_dot_product_attention(q, k, v, **options), expected)
    with replace_sdpa("ssmax", s=gains):
        out = scaled_dot_product_attention(q, k, v, **options).reshape(-1, 4, 5, 8)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    assert allclose(out, attnzoo.attention(q, k, v, "ssmax", s=gains, **options))


@pytest.mark.parametrize("queries", [1, 5])
def test_causality_is_aligned_top_left(queries: int) -> None:
    q, (k, v) = rand(2, 3, queries, 8), qkv(2, 3, 9, 8)[1:]
    mask = (rand(2, 1, queries, 9, seed=4) < 0.5).index_fill(-1, torch.tensor([0]), True)
    top_left = torch.ones(queries, 9, dtype=torch.bool).tril()
    # The weights of position_temperature depend on the positions of the queries.
    for variant in ("softmax", "ssmax", "position_temperature"):
        for given_mask in (None, mask):
            seen = top_left if given_mask is None else top_left & given_mask
            expected = attnzoo.attention(
                q,
                k[..., :queries, :],
                v[..., :queries, :],
                variant,
                attn_mask=seen[..., :queries],
            )
            with replace_sdpa(variant):
                out = scaled_dot_product_attention(q, k, v, given_mask, is_causal=True)
            assert allclose(out, expected)
    expected = scaled_dot_product_attention(q, k, v, top_left)
    assert allclose(scaled_dot_product_attention(q, k, v, is_causal=True), expected)


def test_dropout_and_backend_are_those_of_the_call() -> None:
    q, k, v = qkv(2, 3, 9, 8)
    torch.manual_seed(0)
    expected = attnzoo.attention(q, k, v, "ssmax", dropout_p=0.5, backend="eager")
    torch.manual_seed(0)
    with replace_sdpa("ssmax"), attnzoo.use_backend("eager"):
        assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), expected)
    with (
        replace_sdpa("entmax"),
        attnzoo.use_backend("sdpa"),
        pytest.raises(ValueError, match="backend 'sdpa' cannot run 'entmax'"),
    ):
        scaled_dot_product_attention(q, k, v)


def test_autocast_meta_and_default_device() -> None:
    q, k, v = qkv(2, 3, 9, 8, dtype=torch.float32)
    with replace_sdpa("ssmax"):
        with torch.autocast("cpu", torch.bfloat16):
            out = scaled_dot_product_attention(q, k, v)
        meta = scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v)))
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, attnzoo.attention(*low, "ssmax"))
    assert (meta.shape, meta.device.type) == (q.shape, "meta")
    with torch.device("cpu"), replace_sdpa("ssmax"), torch.device("cpu"):
        out = scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, attnzoo.attention(q, k, v, "ssmax"))


def test_nesting_exceptions_and_decorator() -> None:
    q, k, v = qkv(2, 3, 9, 8)
    soft = scaled_dot_product_attention(q, k, v)
    expected = {name: attnzoo.attention(q, k, v, name) for name in ("entmax", "ssmax", "sigmoid")}
    decorated = replace_sdpa("sigmoid")(scaled_dot_product_attention)
    with replace_sdpa("entmax") as outer:
        with replace_sdpa("ssmax") as inner:
            assert torch.equal(scaled_dot_product_attention(q, k, v), expected["ssmax"])
            assert torch.equal(decorated(q, k, v), expected["sigmoid"])
        with pytest.raises(ZeroDivisionError), replace_sdpa("ssmax"):
            raise ZeroDivisionError
        assert torch.equal(scaled_dot_product_attention(q, k, v), expected["entmax"])
    assert (inner.calls, outer.calls) == (1, 1)
    assert torch.equal(decorated(q, k, v), expected["sigmoid"])
    assert torch.equal(scaled_dot_product_attention(q, k, v), soft)


def test_one_object_is_entered_again() -> None:
    q, k, v = qkv(2, 3, 9, 8)
    soft = scaled_dot_product_attention(q, k, v)
    block = replace_sdpa("ssmax")
    decorated = block(scaled_dot_product_attention)
    with block as outer:
        scaled_dot_product_attention(q, k, v)
        with block as inner:
            out = scaled_dot_product_attention(q, k, v) + decorated(q, k, v)
            scaled_dot_product_attention(q, k, v)
        with pytest.warns(UserWarning, match="redirected no call"), block:
            pass
    with block as again:
        scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, 2 * attnzoo.attention(q, k, v, "ssmax"))
    assert (outer.calls, inner.calls, again.calls) == (1, 2, 1)
    assert torch.equal(scaled_dot_product_attention(q, k, v), soft)


def test_threads_choose_on_their_own() -> None:
    q, k, v = qkv(2, 3, 9, 8)
    outs: list[Tensor] = []
    with replace_sdpa("ssmax") as entered:
        thread = threading.Thread(target=lambda: outs.append(scaled_dot_product_attention(q, k, v)))
        thread.start()
        thread.join()
        outs.append(scaled_dot_product_attention(q, k, v))
    assert entered.calls == 1
    assert torch.equal(outs[0], scaled_dot_product_attention(q, k, v))
    assert torch.equal(outs[1], attnzoo.attention(q, k, v, "ssmax"))


def test_calls_of_attnzoo_keep_their_variants() -> None:
    q, k, v = qkv(2, 3, 9, 8)
    x, layer = rand(2, 5, 16), nn.MultiheadAttention(16, 2, batch_first=True).double()
    layer = attnzoo.nn.replace(layer, "softmax")
    expected = attnzoo.attention(q, k, v), layer(x, x, x)[0]
    with replace_sdpa("sigmoid") as outer, replace_sdpa("entmax") as inner:
        assert allclose(attnzoo.attention(q, k, v, backend="sdpa"), expected[0])
        assert allclose(layer(x, x, x)[0], expected[1])
        assert outer.calls == inner.calls == 0
        outer.calls = inner.calls = 1  # no warning


def test_block_without_calls_warns() -> None:
    with (
        pytest.warns(UserWarning, match="redirected no call: the block did not call torch") as seen,
        replace_sdpa("ssmax"),
    ):
        pass
    with pytest.warns(UserWarning, match="redirected no call") as seen_by_caller:
        replace_sdpa("ssmax")(int)()
    assert seen[0].filename == seen_by_caller[0].filename == __file__
    with warnings.catch_warnings(), pytest.raises(ZeroDivisionError), replace_sdpa("ssmax"):
        warnings.simplefilter("error")
        raise ZeroDivisionError


Q, K, V = qkv(2, 4, 6, 8)
JAGGED = torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)
with warnings.catch_warnings(action="ignore"):  # prototype
    STRIDED = torch.nested.nested_tensor([Q[0], Q[1]])


def redirected(*args: Any, variant: str = "ssmax", **options: Any) -> Callable[[], Tensor]:
    params = options.pop("params", {})
    return lambda: replace_sdpa(variant, **params)(scaled_dot_product_attention)(*args, **options)


test_wrong_calls_raise = raising([
    (lambda: replace_sdpa("ssmx"), ValueError, "did you mean 'ssmax'"),
    (lambda: replace_sdpa("ssmax", t=1.0), TypeError, "has no parameter 't'"),
    (redirected(Q, K, V, params={"softcap": 1.0}), TypeError, "has no parameter 'softcap'"),
    (redirected(Q, K, V, params={"backend": "eager"}), TypeError, "has no parameter 'backend'"),
    (redirected(Q, K, V, params={"s": torch.ones(3)}), ValueError, r"s must have shape \(\) or"),
    (redirected(Q[0], K[0], V[0], params={"s": torch.ones(4)}), ValueError, r"got \(4,\)"),
    (redirected(Q, K, V, variant="topk"), TypeError, "requires the parameter"),
    (redirected(Q, K[..., :3, :], V[..., :3, :], is_causal=True), ValueError, "more queries than"),
    (redirected(Q, K, V[..., :3, :]), ValueError, "value must have as many keys as key, 6, got 3"),
    (redirected(Q[0, 0, 0], K, V), ValueError, r"query must have two dimensions or more, got \(8"),
    (redirected(Q, K[:, :3], V[:, :3]), ValueError, "leading dimensions that broadcast, got"),
    (redirected(Q, K[:, :3], V[:, :3], enable_gqa=True), ValueError, "must be a multiple of k's"),
    (redirected(Q[0, 0], K[0, 0], V[0, 0], rand(2, 6, 6)), ValueError,
     r"attn_mask must broadcast to \(6, 6\), the shape of the scores, got \(2, 6, 6\)"),
    (redirected(Q[0], K[0], V[0], rand(3, 6, 6)), ValueError, r"to \(4, 6, 6\), .*got \(3, 6, 6\)"),
    (redirected(Q, K, V, rand(1, 2, 4, 6, 6)), ValueError, r"to \(2, 4, 6, 6\), .*got \(1, 2, 4"),
    (redirected(Q[None], K, V, rand(3, 2, 1, 6, 6)), ValueError, r"to \(1, 2, 4, .*got \(3, 2, 1"),
    (redirected(Q[None], K[:, :2], V[:, :2], rand(2, 6, 6), enable_gqa=True), ValueError,
     r"to \(1, 2, 4, 6, 6\), .*got \(2, 6, 6\)"),
    (redirected(Q[..., :3, :], K, V, rand(3, 5), is_causal=True), ValueError,
     r"to \(2, 4, 3, 6\), .*got \(3, 5\)"),
    (redirected(Q, K, V, dropout_p=1.0), ValueError, r"dropout_p must be a number in \[0, 1\)"),
    (redirected(STRIDED, STRIDED, STRIDED), TypeError, "query must be a dense tensor, got a"),
    (redirected(JAGGED, JAGGED, JAGGED), TypeError, "plain tensors only, got NestedTensor"),
    (redirected(Q, K, V, causal_lower_right(6, 6)), TypeError, "tensors only, got CausalBias"),
    (redirected(Q, K, V, rand(6, 6), variant="elu"), ValueError, "elu has no additive score"),
    (redirected(Q, K, V, variant="stick_breaking"), ValueError, "is_causal"),
    (redirected(Q[..., :1, :], K, V, variant="position_temperature"), ValueError,
     "does not support the cross-attention of a call with 1 queries and 6 keys"),
])  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("with_grad", [True, False])
def test_layers_of_torch_raise(need_weights: bool, with_grad: bool) -> None:
    """Without gradients, the fused path of torch would not call scaled_dot_product_attention."""
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), rand(2, 5, 16).float()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    match = "does not support torch.nn.MultiheadAttention.*use attnzoo.nn.replace"
    with torch.set_grad_enabled(with_grad):
        for call in (lambda: layer(x, x, x, need_weights=need_weights), lambda: encoder.eval()(x)):
            with pytest.raises(ValueError, match=match), replace_sdpa("ssmax"):
                call()


@pytest.mark.slow
@pytest.mark.parametrize("with_grad", [True, False])
def test_compiled_layers_of_torch_raise(with_grad: bool) -> None:
    torch.compiler.reset()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    @torch.compile(backend="eager")
    def attend_twice(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x) + layer(x)

    match = "does not support torch.nn.MultiheadAttention"
    with (
        torch.set_grad_enabled(with_grad),
        pytest.raises(ValueError, match=match),
        replace_sdpa("ssmax"),
    ):
        attend_twice(rand(2, 5, 8).float())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_enter_the_block_inside(reentrant: bool) -> None:
    def attend(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, K, V, is_causal=True).sin()

    q, like = (Q.clone().requires_grad_() for _ in range(2))
    decorated = replace_sdpa("ssmax")(attend)
    checkpoint(decorated, q, use_reentrant=reentrant).sum().backward()
    attnzoo.attention(like, K, V, "ssmax", is_causal=True).sin().sum().backward()
    assert q.grad is not None
    assert like.grad is not None
    assert allclose(q.grad, like.grad)
    error = ValueError if reentrant else CheckpointError
    with pytest.raises(error, match="use_reentrant|recomputation"), replace_sdpa("ssmax"):
        checkpoint(attend, q, use_reentrant=reentrant).sum().backward()


@pytest.mark.slow
def test_compiled_code_follows_each_choice() -> None:
    torch.compiler.reset()
    host, x = model(GPT, by_attribute, depth=1), inputs(GPT)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(host, fullgraph=True, backend=graphs)
    gains = [rand(4, seed=seed).requires_grad_() for seed in range(2)]
    choices: list[tuple[str | None, dict[str, Any], int]] = [
        (None, {}, 1), ("ssmax", {"s": gains[0]}, 2), ("ssmax", {"s": gains[1]}, 2),
        (None, {}, 2), ("softmax", {}, 3), ("ssmax", {"s": gains[0]}, 3),
    ]  # fmt: skip
    for variant, params, count in choices:
        with nullcontext() if variant is None else replace_sdpa(variant, **params) as entered:
            out = compiled(x)
            assert entered is None or (entered.calls, entered.compiled) == (0, True)
            expected = host(x)
        assert allclose(out, expected)
        assert graphs.frame_count == count
        for leaf in params.values():
            slopes = [torch.autograd.grad(y.sin().sum(), leaf)[0] for y in (out, expected)]
            assert slopes[0].count_nonzero() == 4
            assert allclose(*slopes)


@pytest.mark.slow
def test_block_inside_and_around_compiled_code() -> None:
    torch.compiler.reset()
    q, k, v = qkv(2, 3, 9, 8)
    expected = {name: attnzoo.attention(q, k, v, name) for name in ("softmax", "ssmax", "entmax")}

    @torch.compile(fullgraph=True, backend="eager")
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with replace_sdpa("ssmax"):
            inner = scaled_dot_product_attention(q, k, v)
        return inner, scaled_dot_product_attention(q, k, v)

    inner, outer = both(q, k, v)
    assert allclose(inner, expected["ssmax"])
    assert allclose(outer, expected["softmax"])
    with replace_sdpa("entmax"):
        inner, outer = both(q, k, v)
    assert allclose(inner, expected["ssmax"])
    assert allclose(outer, expected["entmax"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*certain side effects happened")  # torch 2.11 about `compiled`
@pytest.mark.parametrize("strict", [True, False])
def test_exports_hold_the_variant_of_their_export(strict: bool) -> None:
    torch.compiler.reset()
    host, x = model(ViT, by_attribute), inputs(ViT)
    expected = host(x)
    plain = torch.export.export(host, (x,), strict=strict).module()
    with replace_sdpa("ssmax"):
        program = torch.export.export(host, (x,), strict=strict).module()
        assert allclose(program(x), host(x))
        assert allclose(plain(x), expected)
    assert allclose(program(x), replace_sdpa("ssmax")(host)(x))
