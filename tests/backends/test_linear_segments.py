"""Linear forms with segments cost as much as without, and agree with the definition in fp64.

`test_backends` and `test_flash_linear` compare them too; here chunks are short and segments have
all lengths. A segment may end at the end of a chunk, inside of it, or chunks later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends import linear
from attnzoo.functional import packed, varlen
from helpers.cases import params_of, rand

CHUNK = 16
TOKENS = 70  # no multiple of a chunk, neither here nor in the kernels
VARIANTS = ("cosformer", "elu", "hedgehog", "taylor")
slow = partial(pytest.param, marks=pytest.mark.slow)
slow_kernel = partial(pytest.param, marks=[pytest.mark.slow, pytest.mark.interpreter])


def ids_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def repeated(*lengths: int) -> Tensor:
    """Segments of these lengths, for the row and from its end."""
    ids = ids_of((*lengths, TOKENS - sum(lengths)))
    return torch.stack([ids, -ids.flip(0)])


RANDOM = rand(2, 2 * TOKENS, seed=8).mul(2).round().long()
SEGMENTS: dict[str, Tensor | tuple[Tensor, Tensor]] = {
    "of many lengths": repeated(1, 1, 7, 24, 2, 16),
    "long": repeated(3, 55),
    "one": torch.zeros(2, TOKENS, dtype=torch.int32),
    "of one token": torch.arange(TOKENS).expand(2, -1),
    "unsorted": RANDOM[:, :TOKENS],
    # Ids that occur only among the queries have no keys, and the reverse.
    "other ids of keys": (RANDOM[:, :TOKENS], RANDOM[:, TOKENS:] + 1),
    "fewer queries": (RANDOM[:, TOKENS : TOKENS + 33], RANDOM[:, :TOKENS]),
    "more queries": (RANDOM, RANDOM[:, TOKENS:]),
}
# The kernels run in an interpreter, so that the quick tests have two pairs.
QUICK = ("of many lengths", "other ids of keys")


def pairs() -> Iterator[Any]:
    """All pairs of a variant and segments. The quick ones have all segments, and all variants."""
    for variant, segments in product(VARIANTS, SEGMENTS):
        quick = variant == "cosformer" or segments == "of many lengths"
        yield pytest.param(variant, segments, marks=[] if quick else pytest.mark.slow)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that could be read are not read, as on a GPU."""
    monkeypatch.setattr(linear, "CHUNK", CHUNK)
    monkeypatch.setattr(packed, "splits", lambda q, backend: False)


def tensors(queries: int = TOKENS, keys: int = TOKENS, value_dim: int = 5) -> dict[str, Tensor]:
    """q, k and v (fp64) of four query heads and two key/value heads."""
    shapes = (2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, value_dim)
    leaves = {name: rand(*shape, seed=i) for i, (name, shape) in enumerate(zip("qkv", shapes))}
    for name in "qk":  # otherwise weights of cosformer may be 0/0, see `agreement.make`
        leaves[name][..., 0] = leaves[name][..., 0].abs() + 0.5
    return leaves


def results(
    variant: str, backend: str, leaves: dict[str, Tensor], **options: Any
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    out = attnzoo.attention(
        **leaves, variant=variant, backend=backend, enable_gqa=True, **params_of(variant), **options
    )
    do = rand(*out.shape, seed=5).to(out.dtype)
    return {
        "out": out.detach(),
        **dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], do))),
    }


def agree(
    variant: str, backend: str, leaves: dict[str, Tensor], tolerance: float, **options: Any
) -> None:
    have = results(variant, backend, leaves, **options)
    want = results(variant, "eager", {n: x.double() for n, x in leaves.items()}, **options)
    for name, exact in want.items():
        assert have[name].shape == exact.shape
        if exact.numel():
            error = float((have[name].double() - exact).abs().max())
            assert error <= tolerance * (1 + float(exact.abs().max())), name


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("variant", "segments"), list(pairs()))
def test_linear_agrees_with_the_definition(variant: str, segments: str, is_causal: bool) -> None:
    ids = SEGMENTS[segments]
    of_queries, of_keys = (ids, ids) if isinstance(ids, Tensor) else ids
    leaves = tensors(of_queries.shape[1], of_keys.shape[1])
    agree(variant, "linear", leaves, 1e-12, segment_ids=ids, is_causal=is_causal)


@pytest.mark.interpreter
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "segments", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in SEGMENTS]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_flash_linear_agrees_with_the_definition(
    dtype: torch.dtype, segments: str, is_causal: bool
) -> None:
    """Its error bounds, element by element, are those of `test_flash_linear`."""
    ids = SEGMENTS[segments]
    of_queries, of_keys = (ids, ids) if isinstance(ids, Tensor) else ids
    leaves = tensors(of_queries.shape[1], of_keys.shape[1])
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    tolerance = 40 * torch.finfo(dtype).eps
    agree("elu", "flash_linear", leaves, tolerance, segment_ids=ids, is_causal=is_causal)


@pytest.mark.parametrize(
    ("backend", "heads"),
    [
        ("linear", 1),
        ("linear", 4),
        slow_kernel("flash_linear", 1),
        pytest.param("flash_linear", 4, marks=pytest.mark.interpreter),
    ],
)
def test_masked_keys_do_not_count(backend: str, heads: int) -> None:
    """The masks of the heads of a group may differ; a masked NaN does not spread."""
    leaves = {name: x.float() for name, x in tensors().items()}
    mask = rand(2, heads, 1, TOKENS, seed=7) > -0.5
    ids, ends = SEGMENTS["unsorted"], slice(60, None)
    mask[..., ends] = False
    agree("elu", backend, leaves, 1e-5, segment_ids=ids, attn_mask=mask, is_causal=True)
    leaves["v"][:, :, ends] = float("nan")
    out = results("elu", backend, leaves, segment_ids=ids, attn_mask=mask)["out"]
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("backend", ["linear", slow_kernel("flash_linear")])
def test_other_documents_are_not_read(backend: str, is_causal: bool) -> None:
    """NaN in one document does not reach the others, as long as they share no chunk with it."""
    length = 64  # a multiple of the chunks of both backends
    leaves = {name: x[:1, :1].float() for name, x in tensors(3 * length, 3 * length).items()}
    ids = (torch.arange(3 * length) // length)[None]
    leaves["v"][:, :, length : 2 * length] = float("nan")
    have = results("elu", backend, leaves, segment_ids=ids, is_causal=is_causal)
    for name, x in have.items():
        others = torch.cat([x[:, :, :length], x[:, :, 2 * length :]], dim=2)
        assert bool(others.isfinite().all()), name
        assert bool(have["out"][:, :, length : 2 * length].isnan().all())


@pytest.mark.parametrize(
    "backend", ["linear", pytest.param("flash_linear", marks=pytest.mark.interpreter)]
)
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_a_row_without_tokens_has_gradients(backend: str, queries: int, keys: int) -> None:
    leaves = {name: x.float() for name, x in tensors(queries, keys).items()}
    ids = tuple(torch.zeros(2, n, dtype=torch.int64) for n in (queries, keys))
    agree("elu", backend, leaves, 0.0, segment_ids=ids, is_causal=True)


def test_cost_is_linear_in_the_row() -> None:
    """Dense scores of 2¹⁴ tokens would take a GiB. Only sorted ids are split on a CPU."""
    tokens, length = 2**14, 64
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(tokens) // length)[order][None]
    q, k, v = (torch.randn(1, 1, tokens, 4) for _ in range(3))
    linear.CHUNK = 128
    out = attnzoo.attention(q, k, v, "elu", segment_ids=ids, backend="linear")
    of_first = (ids[0] == 0).nonzero()[:, 0]
    q, k, v = (x[:, :, of_first] for x in (q, k, v))
    want = attnzoo.attention(q, k, v, "elu", backend="eager")
    assert torch.allclose(out[:, :, of_first], want, atol=1e-5)


# ---- varlen_attention whose lengths cannot be read ----------------------------------------------


@pytest.mark.parametrize("is_causal", [True, slow(False)])
@pytest.mark.parametrize("backend", ["linear", slow_kernel("flash_linear")])
@pytest.mark.parametrize("variant", ["cosformer", slow("taylor")])
def test_sequences_run_as_segments(
    monkeypatch: pytest.MonkeyPatch, variant: str, backend: str, is_causal: bool
) -> None:
    """`max_length` limits a sequence, not the row. Some sequences have no or one token."""
    lengths = 5, 0, 1, 30, 1, 16, 17, 0
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    options |= {"max_length": 30} if variant == "cosformer" else {}
    inputs = [x[0].float().transpose(0, 1).contiguous() for x in tensors().values()]
    query, key, value = (x.requires_grad_() for x in inputs)
    leaves = [query, key, value]
    want = []
    for start, stop in zip(ends.tolist(), ends.tolist()[1:]):
        q, k, v = (x[start:stop].transpose(0, 1)[None].double() for x in leaves)
        out = attnzoo.attention(q, k, v, variant, backend="eager", **options)
        want.append(out[0].transpose(0, 1))
    want = torch.cat(want)
    shapes: list[torch.Size] = []
    chosen = varlen.BACKENDS[backend]

    def record(q: Tensor, *others: Any) -> Any:
        shapes.append(q.shape)
        return chosen.run(q, *others)

    monkeypatch.setitem(varlen.BACKENDS, backend, type(chosen)(**{**vars(chosen), "run": record}))
    monkeypatch.setattr(varlen, "is_recorded", lambda: True)
    have = attnzoo.varlen_attention(
        query, key, value, ends, ends, 30, 30, variant, backend=backend, **options
    )  # fmt: skip
    assert shapes == [(1, 4, TOKENS, 6)]
    do = rand(*have.shape, seed=5)
    gradients = [torch.autograd.grad(x, leaves, do.to(x.dtype)) for x in (have, want)]
    for got, exact in zip((have, *gradients[0]), (want, *gradients[1]), strict=True):
        assert torch.allclose(got.double(), exact.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("own_registry")
def test_positions_restart_with_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature map of absolute positions, as a user may write it, shows them."""
    seen: list[Tensor] = []

    def features(x: Tensor, positions: Tensor) -> Tensor:
        seen.append(positions)
        return torch.nn.functional.elu(x) + 1

    form = attnzoo.Linear(features, lambda d: d)
    variant = replace(
        attnzoo.get_variant("elu"), name="positioned", aliases=(), forms=lambda call: (form,)
    )
    attnzoo.register_variant(variant)
    monkeypatch.setattr(varlen, "is_recorded", lambda: True)
    ends = torch.tensor([0, 3, 3, 7])
    q = rand(7, 2, 6)
    attnzoo.varlen_attention(q, q, q, ends, ends, 4, 4, "positioned", backend="linear")
    assert len(seen) > 0
    assert all(x.tolist() == [0, 1, 2, 0, 1, 2, 3] for x in seen)


# ---- compilers -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "backend", ["linear", pytest.param("flash_linear", marks=pytest.mark.interpreter)]
)
def test_compiles_without_graph_breaks_and_agrees(backend: str, is_causal: bool) -> None:
    q, k, v = (x.float().requires_grad_() for x in tensors(20, 20).values())

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return attnzoo.attention(
            q, k, v, "elu", is_causal=is_causal, segment_ids=ids, enable_gqa=True, backend=backend
        )

    torch.compiler.reset()
    ids = torch.arange(20).expand(2, -1) // 9
    outcomes = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(q, k, v, ids)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for have, want in zip(*outcomes, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_graph_with_dynamic_lengths_uses_another_backend() -> None:
    def attend(q: Tensor, ids: Tensor, backend: str | None) -> Tensor:
        return attnzoo.attention(q, q, q, "elu", segment_ids=ids, backend=backend)

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    q, ids = rand(2, 2, 40, 6), torch.arange(40).expand(2, -1) // 9
    assert torch.allclose(compiled(q, ids, None), attend(q, ids, "eager"))
    with pytest.raises(Exception, match="segment_ids in a graph with dynamic lengths"):
        compiled(q, ids, "linear")
