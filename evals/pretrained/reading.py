"""Reads contexts with a model: the hidden states and cache of a prefix, logits in chunks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from commandline.errors import UsageError

CHUNK = 512  # tokens whose logits are in memory at a time


class _BodyOutput(tuple[Tensor]):
    """The output of a body: hidden states, and None for everything else."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _FixedBody(nn.Module):
    """Stands in for the body of a model and returns these hidden states (B, N, width)."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.output = _BodyOutput((hidden,))

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


class Reader:
    """A causal language model in two parts: the body, and the head that makes logits.

    With the logits of all tokens at once, a long context would need memory for length × vocabulary
    numbers. The head therefore runs on chunks of the hidden states. It is the model's own forward
    function with the body replaced, so that softcaps and scales of logits are kept.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.body = model.base_model
        if self.body is model:
            raise UsageError(
                f"--model must have a body below its output layer, got {type(model).__name__}"
            )

    def read(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """The hidden states (B, N, width) of tokens (B, N) after those in the cache, and the cache
        with them. The cache passed in is unchanged."""
        out = self.body(
            input_ids=ids.to(self.model.device),
            past_key_values=copy.deepcopy(cache),
            use_cache=True,
        )
        return out.last_hidden_state, out.past_key_values

    def read_pieces(self, ids: Tensor, size: int) -> tuple[Tensor | None, Any, Tensor]:
        """Read all but the last ``size`` tokens in pieces of this size, the first one shorter.

        Returns:
            the hidden states of these tokens, the cache, and the tokens that are not read yet;
            None instead of hidden states and cache if there are no more than ``size`` tokens.
        """
        unread, cache, parts = ids, None, []
        while unread.shape[1] > size:
            first = unread.shape[1] % size or size
            hidden, cache = self.read(unread[:, :first], cache)
            parts.append(hidden)
            unread = unread[:, first:]
        return torch.cat(parts, 1) if parts else None, cache, unread

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (B, N, vocabulary) at hidden states (B, N, width)."""
        name = self.model.base_model_prefix
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        setattr(self.model, name, _FixedBody(hidden))
        try:
            return self.model(input_ids=ids, use_cache=False).logits
        finally:
            setattr(self.model, name, self.body)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """−log P of the targets (B, N) at hidden states (B, N, width), fp32 (B, N)."""
        targets = targets.to(hidden.device)
        parts = [
            surprisal(self.logits(h).float(), t)
            for h, t in zip(hidden.split(CHUNK, 1), targets.split(CHUNK, 1), strict=True)
        ]
        return torch.cat(parts, 1).cpu()


def surprisal(logits: Tensor, targets: Tensor) -> Tensor:
    """−log P of the targets (…) under logits (…, vocabulary).

    torch's log_softmax and cross_entropy may add up the exponentials one by one. With 50 000 tokens
    in the vocabulary that costs up to four digits in fp32; logsumexp adds them in pairs.
    """
    return logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]


def only(cache: Any, index: int) -> Any:
    """A copy of a cache with one entry of its batch."""
    selected = copy.deepcopy(cache)
    device = next(layer.keys.device for layer in cache.layers)
    selected.batch_select_indices(torch.tensor([index], device=device))
    return selected
