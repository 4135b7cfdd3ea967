"""attnzoo.nn.Transformer with packed documents and with padding: equal to the documents alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.nn import Transformer
from attnzoo.nn.segments import restarted
from attnzoo.nn.transformer import POSITIONS
from helpers.cases import ALL_VARIANTS, NO_SCORE, mark_expensive, rand, unprojected
from helpers.crossed import crossed
from helpers.errors import WrongCalls, raising

IDS = torch.tensor([[4] * 5 + [2] + [7] * 8, [0] * 14])
DOCUMENTS = [(0, slice(0, 5)), (0, slice(5, 6)), (0, slice(6, 14)), (1, slice(0, 14))]
TOKENS = torch.randint(20, (2, 14), generator=torch.Generator().manual_seed(3))


def model(variant: Any = "softmax", positions: str = "rope", **options: Any) -> Transformer:
    """Return an fp64 model with large random matrices, so that attention is not uniform."""
    made = Transformer(20, 16, 4, 2, variant, positions, **options).double().eval()
    with torch.no_grad():
        for i, x in enumerate(made.parameters()):
            if x.dim() > 1:
                x.copy_(0.3 * rand(*x.shape, seed=i))
    return made


def one_by_one(made: Transformer) -> Tensor:
    """Return the hidden states of the documents, each computed alone, in the packed layout."""
    states = torch.zeros(*TOKENS.shape, 16, dtype=torch.float64)
    for row, span in DOCUMENTS:
        states[row, span] = made.states(TOKENS[row : row + 1, span])[0]
    return states


# Variants without a score do not support ALiBi.
CALLS = [
    case
    for case in crossed(mark_expensive(ALL_VARIANTS), ("rope", "alibi"))
    if case.values[1] == "rope" or case.values[0] not in NO_SCORE
]


@pytest.mark.parametrize(("variant", "positions"), CALLS)
def test_packed_documents_equal_documents_one_by_one(variant: str, positions: str) -> None:
    made = model(variant, positions, window=6, **unprojected(variant))
    with torch.no_grad():
        packed = made.states(TOKENS, segment_ids=IDS)
        assert torch.allclose(packed, one_by_one(made), atol=1e-6)
        assert torch.allclose(made(TOKENS, segment_ids=IDS), made.logits(packed))


@pytest.mark.parametrize(("variant", "positions"), [*CALLS, ("ssmax", "p-rope"), ("ssmax", "nape")])
def test_left_padding_does_not_change_the_logits(variant: str, positions: str) -> None:
    """Features of rotated queries and keys depend on positions, which count no padding."""
    made = model(variant, positions, **unprojected(variant))
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), TOKENS], dim=1)
    mask = (torch.arange(19) >= 5).expand(2, 1, 1, 19)
    with torch.no_grad():
        expected = made(TOKENS)
        assert torch.allclose(made(padded, attn_mask=mask)[:, 5:], expected, atol=1e-9)
        caches, parts = made.new_caches(19), []
        for start, stop in ((0, 9), (9, 10), (10, 19)):
            step = padded[:, start:stop]
            parts.append(made(step, attn_mask=mask[..., :stop], caches=caches))
        assert torch.allclose(torch.cat(parts, 1)[:, 5:], expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 1, 1, 14), (2, 14), (14, 14), (2, 1, 14, 14), (2, 1, 1, 1)])
def test_a_mask_that_is_no_key_mask_of_the_tokens_raises(shape: tuple[int, ...]) -> None:
    """A padding mask (B, N) of N sequences would broadcast to a mask of queries and keys."""
    words = r"key mask of shape \(2, 1, 1, 14\) or \(1, 1, 1, 14\) for tokens \(2, 14\), got"
    with pytest.raises(ValueError, match=words):
        model()(TOKENS, attn_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"attn_mask must be bool .*, got torch\.float32"):
        model()(TOKENS, attn_mask=torch.ones(shape))


def test_loss_and_gradients_of_a_packed_batch_are_those_of_its_documents() -> None:
    target = TOKENS.roll(-1, 1)
    for row, span in DOCUMENTS:
        target[row, span.stop - 1] = -100  # the last token of a document predicts nothing
    made = model("forgetting")
    parameters = list(made.parameters())
    packed = made.loss(made.states(TOKENS, segment_ids=IDS), target)
    losses = []
    for row, span in DOCUMENTS:
        tokens, count = TOKENS[row : row + 1, span], span.stop - span.start - 1
        if count:
            losses.append(count * made.loss(made.states(tokens[:, :-1]), tokens[:, 1:]))
    expected = sum(losses) / (target != -100).sum()
    assert torch.allclose(packed, expected)
    pairs = (torch.autograd.grad(x, parameters) for x in (packed, expected))
    assert all(torch.allclose(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("positions", POSITIONS)
def test_decoding_a_packed_sequence_equals_one_call(positions: str) -> None:
    made = model(["forgetting", "ssmax"], positions)
    with torch.no_grad():
        caches, parts = made.new_caches(16), []
        for start, stop in ((0, 4), (4, 7), (7, 14)):
            ids = IDS[:, :stop]
            parts.append(made(TOKENS[:, start:stop], caches=caches, segment_ids=ids))
        assert torch.allclose(torch.cat(parts, dim=1), made(TOKENS, segment_ids=IDS))


def test_equal_ids_change_nothing_and_masks_still_apply() -> None:
    made = model()
    with torch.no_grad():
        ids = torch.zeros(2, 14, dtype=torch.int32)
        assert torch.allclose(made(TOKENS, segment_ids=ids), made(TOKENS))
        mask = torch.arange(14).expand(2, 1, 1, 14) < 9
        padded = made(TOKENS, segment_ids=IDS, attn_mask=mask)
        assert torch.allclose(padded[:, :9], made(TOKENS, segment_ids=IDS)[:, :9])


def test_positions_restart_with_each_run_of_ids() -> None:
    assert restarted(IDS).tolist() == [[*range(5), 0, *range(8)], [*range(14)]]
    assert restarted(torch.tensor([[1, 2, 3]], dtype=torch.uint8)).tolist() == [[0, 0, 0]]
    assert restarted(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


def test_angles_of_a_document_are_those_of_the_document_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention depends on differences of angles only, so outputs do not show that they restart."""
    made, seen = model(), []
    rotation = made._rotation
    monkeypatch.setattr(made, "_rotation", lambda x: seen.append(rotation(x)) or seen[-1])
    made(TOKENS, segment_ids=IDS)
    for row, span in DOCUMENTS:
        made(TOKENS[row : row + 1, span])
        assert torch.equal(seen[0][:, row, 0, span], seen.pop())


@pytest.mark.slow
def test_a_packed_call_compiles_as_one_graph() -> None:
    made = model("ssmax").float()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    expected = made(TOKENS, segment_ids=IDS)
    assert torch.allclose(compiled(TOKENS, segment_ids=IDS), expected, atol=1e-5)


WRONG: WrongCalls = [
    (
        lambda: model()(TOKENS, segment_ids=[[0]]),
        TypeError,
        "segment_ids must be a tensor, got list",
    ),
    (
        lambda: model()(TOKENS, segment_ids=IDS[:, :5]),
        ValueError,
        r"segment_ids must have shape \(2, 14\) for tokens \(2, 14\), got \(2, 5\)",
    ),
    (
        lambda: model()(TOKENS, segment_ids=IDS.double()),
        TypeError,
        "segment_ids must be uint8, int8, int16, int32 or int64, got torch.float64",
    ),
    (
        lambda: model()(TOKENS, segment_ids=IDS.to(torch.uint16)),
        TypeError,
        "segment_ids must be uint8, int8, int16, int32 or int64, got torch.uint16",
    ),
    (
        lambda: model()(TOKENS, segment_ids=IDS.to("meta")),
        ValueError,
        "segment_ids must be on the device of tokens cpu, got meta",
    ),
    (
        lambda: model()(TOKENS[:, :4], segment_ids=torch.tensor([[1, 1, 0, 0], [1, 2, 1, 1]])),
        ValueError,
        r"segment_ids must be equal only in adjacent tokens, got \[1, 2, 1, 1\] in row 1",
    ),
    (
        lambda: model("taylor")(TOKENS, segment_ids=IDS, caches=model("taylor").new_caches(16)),
        ValueError,
        "segment_ids must be None with a StateCache",
    ),
]


test_wrong_segment_ids_raise = raising(WRONG)


def test_segment_ids_with_caches_cover_all_tokens_so_far() -> None:
    made = model()
    caches = made.new_caches(16)
    with torch.no_grad():
        made(TOKENS[:, :9], segment_ids=IDS[:, :9], caches=caches)
        with pytest.raises(ValueError, match=r"shape \(2, 10\), all tokens so far, for tokens"):
            made(TOKENS[:, 9:10], segment_ids=IDS[:, 9:10], caches=caches)
