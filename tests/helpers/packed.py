"""A call on slices of a packed projection, on any device, whose inputs can be replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import attnzoo
from helpers.cases import params_of, rand

TOKENS, HEADS, HEAD_DIM = 150, 2, 32
WIDTH = 3 * HEADS * HEAD_DIM


@dataclass
class PackedCall:
    """q, k and v are slices (B, N, H, D) of one bf16 tensor, seen as (B, H, N, D).

    start: number of entries before q in each row. Rows are a multiple of 16 bytes apart, so start =
    4 puts all slices 8 bytes after such a multiple.
    """

    variant: str
    backend: str = "flash"
    start: int = 0
    device: str = "cpu"
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = torch.zeros(1, TOKENS, WIDTH + 8, dtype=torch.bfloat16, device=self.device)
        self.leaf.requires_grad_()
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Replace q, k and v in place."""
        values = rand(1, TOKENS, WIDTH, seed=seed)
        with torch.no_grad():
            self.leaf[..., self.start : self.start + WIDTH].copy_(values)

    def slices(self) -> list[Tensor]:
        packed = self.leaf[..., self.start : self.start + WIDTH]
        parts = packed.split(HEADS * HEAD_DIM, -1)
        return [x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for x in parts]

    def outputs_and_gradients(self) -> list[Tensor]:
        """The output and the gradient of q, k and v; of decode the output for the last query."""
        q, k, v = self.slices()
        if self.backend == "decode":
            q, k, v = q.detach()[:, :, -1:], k.detach(), v.detach()
        out = attnzoo.attention(
            q, k, v, self.variant, is_causal=True, backend=self.backend,
            **params_of(self.variant, TOKENS),
        )  # fmt: skip
        if self.backend == "decode":
            return [out.detach()]
        (gradient,) = torch.autograd.grad(out.float().square().sum(), self.leaf)
        return [out.detach(), gradient[..., self.start : self.start + WIDTH]]


CALLS = [
    *((variant, "flash") for variant in ("softmax", "ssmax", "sigmoid", "entmax")),
    ("adaptive_temperature", "flash"),
    ("cosformer", "flash_linear"),
    ("softmax", "decode"),
    ("entmax", "decode"),
]
