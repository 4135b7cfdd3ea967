"""`flash` walks only the key range of a tile's segments. Which keys count is up to the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.triton.common.launch import Launch, run
from attnzoo.backends.triton.common.tiles import Config
from attnzoo.backends.triton.flash.segments import segment_ranges
from helpers.cases import rand

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

LENGTH, DOCUMENTS = 64, 3  # 64 is a multiple of the blocks of all kernels here


def gradients(leaves: list[Tensor], do: Tensor, variant: str, **options: Any) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attnzoo.attention(*leaves, variant, backend="flash", enable_gqa=True, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, do)


@pytest.mark.parametrize(
    "variant",
    [
        "softmax",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("entmax", "sigmoid", "adaptive_temperature")
        ),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_other_documents_are_not_read(variant: str, is_causal: bool) -> None:
    """NaN in one document does not reach the others, because 0 · NaN is never computed."""
    shapes = [(1, heads, LENGTH * DOCUMENTS, 16) for heads in (2, 1, 1, 2)]
    q, k, v, do = (rand(*shape, seed=seed).float() for seed, shape in enumerate(shapes))
    params = {"alpha": 1.5} if variant == "entmax" else {}
    ids = torch.arange(LENGTH * DOCUMENTS).expand(1, -1) // LENGTH
    bad = slice(LENGTH, 2 * LENGTH)
    for x in (v, do):
        x[..., bad, :] = float("nan")
    packed = gradients([q, k, v], do, variant, segment_ids=ids, is_causal=is_causal, **params)
    for document in (0, 2):
        part = slice(document * LENGTH, (document + 1) * LENGTH)
        alone = gradients(
            [x[..., part, :] for x in (q, k, v)], do[..., part, :], variant,
            is_causal=is_causal, **params,
        )  # fmt: skip
        for have, want in zip(packed, alone, strict=True):
            torch.testing.assert_close(have[..., part, :], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["softmax", "entmax", "adaptive_temperature"])
def test_decode_does_not_read_other_documents(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two queries are in the last document, of which the splits share the blocks."""
    monkeypatch.setattr("attnzoo.backends.triton.decode.launch.LEAST_KEYS", 32)
    q, k, v = (
        rand(2, heads, n, 16, seed=n + heads).float() for heads, n in ((4, 2), (2, 200), (2, 200))
    )
    ids = torch.arange(200).expand(2, -1) // 60  # the documents begin at 0, 60, 120 and 180
    last = ids == 3
    v[..., :160, :] = float("nan")  # blocks have 32 keys: the one from 160 on is read
    v[..., 160:180, :] = 0.0
    params = {"alpha": 1.5} if variant == "entmax" else {}
    out = attnzoo.attention(
        q, k, v, variant, segment_ids=(ids[:, -2:], ids), is_causal=True, enable_gqa=True,
        backend="decode", **params,
    )  # fmt: skip
    alone = (x[:, :, last[0]] for x in (k, v))
    want = attnzoo.attention(
        q, *alone, variant, is_causal=True, enable_gqa=True, backend="eager", **params
    )
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


IDS = {
    "sorted": ([0] * 30 + [3] * 40, [0] * 50 + [2] * 10 + [3] * 15),
    "not sorted": ([5, -1] * 35, [-1, 5, 7] * 25),
    "large numbers": ([2**40] * 40 + [2**41] * 30, [2**40 + 1] * 40 + [2**41] * 35),
    "no key": ([1] * 70, [2] * 75),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_agrees_with_tiled(ids: tuple[list[int], list[int]]) -> None:
    q, k, v = (
        rand(2, heads, n, 16, seed=heads + n).float().requires_grad_()
        for heads, n in ((2, 70), (1, 75), (1, 75))
    )
    q_ids, k_ids = (torch.tensor([x, x[::-1]]) for x in ids)
    do = rand(2, 2, 70, 16, seed=9).float()
    results = []
    for backend in ("flash", "tiled"):
        out = attnzoo.attention(
            q, k, v, segment_ids=(q_ids, k_ids), enable_gqa=True, backend=backend
        )
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), do)])
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_ranges_reach_from_the_first_to_the_last_shared_segment(
    ids: tuple[list[int], list[int]],
) -> None:
    segments, others = (torch.tensor([x, x[::-1]]) for x in ids)
    block, tiles = 32, 3
    ranges = torch.full((2, tiles, 2), -1, dtype=torch.int32)
    args = {
        "segments": segments, "others": others, "ranges": ranges, "count": 70, "other_count": 75,
        "BLOCK": block, "CHUNK": 16,
    }  # fmt: skip
    run(Launch(segment_ranges, 2 * tiles, args, Config(1, 1, 4, 1)))
    for b in range(2):
        for tile in range(tiles):
            ids_of_tile = segments[b, tile * block : (tile + 1) * block]
            inside = (others[b] >= ids_of_tile.min()) & (others[b] <= ids_of_tile.max())
            at = inside.nonzero()[:, 0].tolist()
            want = [at[0], at[-1] + 1] if at else [75, 0]
            assert ranges[b, tile].tolist() == want
