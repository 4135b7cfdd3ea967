"""RoPE: its frequencies, their scaling for inputs longer than those in training, the rotation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnzoo.core.call import widened
from attnzoo.core.checks import check_sizes, did_you_mean, shown
from attnzoo.nn.checks import check_range


def frequencies(pair: Tensor, head_dim: int, base: float) -> Tensor:
    """The angle per token of each pair of features, θ_p = base^(−2p/D).

    ``pair`` has the numbers p of the pairs, from 0.
    """
    return base ** (-2 * pair / head_dim)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates each pair of features (p, p + D/2) of a head by the p-th angle of the token."""
    (cos, sin), count = rotation, rotation.shape[-1]
    first, second = widened(x).chunk(2, dim=-1)
    a, b = first[..., :count], second[..., :count]
    parts = a * cos - b * sin, first[..., count:], b * cos + a * sin, second[..., count:]
    return torch.cat(parts, dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Scaling(ABC):
    """Changed frequencies, for inputs that are ``factor`` times as long as those in training.

    amplitude: what multiplies queries and keys, the square root of the factor of the logits.
    """

    rope_type: ClassVar[str]
    factor: float

    @property
    def amplitude(self) -> float:
        return 1.0

    def check(self, head_dim: int, base: float) -> None:
        """Raises unless the type has frequencies for this head dimension and base."""
        return

    @abstractmethod
    def frequencies(self, pair: Tensor, head_dim: int, base: float) -> Tensor:
        """The frequencies; the arguments are those of the function `frequencies`."""

    def as_dict(self) -> dict[str, Any]:
        """The argument ``rope_scaling``, with all keys."""
        return {"rope_type": self.rope_type, **asdict(self)}


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation, Chen et al. 2023, arXiv:2306.15595: θ_p / factor."""

    rope_type = "linear"

    def frequencies(self, pair: Tensor, head_dim: int, base: float) -> Tensor:
        return frequencies(pair, head_dim, base) / self.factor


@dataclass(frozen=True)
class NTKScaling(Scaling):
    """NTK-aware interpolation, Peng et al. 2023, arXiv:2309.00071, Section 3.1.

    The lowest frequency is that of position interpolation, and the highest one does not change.
    """

    rope_type = "ntk"

    def check(self, head_dim: int, base: float) -> None:
        if head_dim == 2:
            raise ValueError("rope_scaling of type 'ntk' needs a head dimension above 2, got 2")

    def frequencies(self, pair: Tensor, head_dim: int, base: float) -> Tensor:
        return frequencies(pair, head_dim, base * self.factor ** (head_dim / (head_dim - 2)))


@dataclass(frozen=True)
class YaRNScaling(Scaling):
    """YaRN, Peng et al. 2023, arXiv:2309.00071, Sections 3.2 and 3.4.

    Pairs that turn more than ``beta_fast`` times in the train length keep their frequencies, and
    those that turn less than ``beta_slow`` times are interpolated. Between them, equation 18 is
    linear in the number of turns. Here, as in the authors' code and in transformers, the share is
    linear in the number of the pair, from bounds that are rounded outwards.
    """

    rope_type = "yarn"
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def check(self, head_dim: int, base: float) -> None:
        if base == 1:
            raise ValueError("rope_scaling of type 'yarn' needs a rope_base above 1, got 1")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                "rope_scaling must have 0 < beta_slow < beta_fast, got "
                f"beta_slow = {self.beta_slow:g} and beta_fast = {self.beta_fast:g}"
            )

    @property
    def amplitude(self) -> float:
        default = 0.1 * math.log(self.factor) + 1
        return default if self.attention_factor is None else self.attention_factor

    def frequencies(self, pair: Tensor, head_dim: int, base: float) -> Tensor:
        def pair_with(turns: float) -> float:
            """The number, not rounded, of the pair that turns so often in the train length."""
            wavelength = self.original_max_position_embeddings / turns
            return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_with(self.beta_fast)), 0)
        high = min(math.ceil(pair_with(self.beta_slow)), head_dim - 1)
        # Where the bounds meet or cross, all pairs up to the first bound keep their frequencies.
        interpolated = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequencies(pair, head_dim, base) * (1 - interpolated * (1 - 1 / self.factor))


SCALINGS = {kind.rope_type: kind for kind in (LinearScaling, NTKScaling, YaRNScaling)}


def parse_scaling(scaling: Any, head_dim: int, base: float) -> Scaling:
    """The scaling that the argument ``rope_scaling`` of `Transformer` describes."""
    if not isinstance(scaling, Mapping):
        raise TypeError(f"rope_scaling must be a dict or None, got {shown(scaling)}")
    values = dict(scaling)
    name = values.pop("rope_type", None)
    if not isinstance(name, str) or name not in SCALINGS:
        raise ValueError(
            f"rope_scaling['rope_type'] must be one of {', '.join(SCALINGS)}, got {shown(name)}"
        )
    known = {field.name: field.default for field in fields(SCALINGS[name])}
    for key in values:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it has: {', '.join(known)}"
            raise ValueError(f"rope_scaling of type {name!r} has no key {shown(key)}{hint}")
    for key, default in known.items():
        if key not in values and default is MISSING:
            raise ValueError(f"rope_scaling of type {name!r} needs the key {key!r}")
        value, what = values.get(key, default), f"rope_scaling[{key!r}]"
        if key == "original_max_position_embeddings":
            check_sizes(**{what: value})
        elif value is not None or default is not None:
            values[key] = check_range(what, value, 1 if key == "factor" else 0)
    made = SCALINGS[name](**values)
    made.check(head_dim, base)
    return made
