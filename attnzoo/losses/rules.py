"""What a rule of losses is, the tokens and options that it gets, and its sums over the classes.

A rule takes logits z (n, K) of n tokens, these tokens, the names of wanted gradients, and options.
It returns "loss", statistics and gradients of per-token vectors, each (n,), by name. If gradients
are wanted, z becomes ∂(factor · loss)/∂z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Rule, Vectors
from attnzoo.backends.tiled.threshold import (
    enough_steps,
    newton,
    newton_step,
    solve_threshold,
    threshold_sums,
)
from attnzoo.core.activation import Activation
from attnzoo.core.function_keys import ACTIVATIONS
from attnzoo.functional.largest import Blocks, largest

NEG_INF = float("-inf")


class ClassShard(NamedTuple):
    """The K classes of this process: all V classes, or those of one rank if there is a group.

    Ranks exchange numbers in `sum` and `max` only.
    """

    group: str = ""  # the name of the process group whose ranks hold the other classes
    first: int = 0  # the first class of this rank
    classes: int = 0  # V
    largest_shard: int = 0  # the largest K of a rank

    def total(self, here: int) -> int:
        """The number of all classes, from the number of those in this process."""
        return self.classes if self.group else here

    def most(self, here: int) -> int:
        """The largest number of classes in a process."""
        return self.largest_shard if self.group else here

    def local(self, x: Tensor) -> Tensor:
        """The entries of the classes of this process, from (…, V) to (…, K)."""
        return x[..., self.first : self.first + self.largest_shard] if self.group else x

    def sum(self, x: Tensor) -> Tensor:
        """A sum over all classes, from the sum over the classes of this process."""
        return self._reduced(x, "sum")

    def max(self, x: Tensor) -> Tensor:
        """The largest over all classes, from the largest of this process."""
        return self._reduced(x, "max")

    def _reduced(self, x: Tensor, how: str) -> Tensor:
        if not self.group:
            return x
        from attnzoo.core.collectives import reduced  # slow to import

        return reduced(x, how, self.group)

    def at(self, x: Tensor, classes: Tensor) -> Tensor:
        """The entries of x (n, K) at one class per row, (n, 1)."""
        if not self.group:
            return x.gather(1, classes)
        column, here = self._columns(x, classes)
        entry = x.gather(1, column)
        entry = entry.float() if x.dtype == torch.bool else entry  # reductions have no bool
        value, ranks = self.sum(torch.stack([entry.where(here, 0.0), here.to(entry.dtype)]))
        # Targets are not checked on a GPU. A class that no rank has must not count as score 0.
        return value.where(ranks > 0, float("nan")).to(x.dtype)

    def add_at(self, x: Tensor, classes: Tensor, values: Tensor) -> Tensor:
        """Add ``values`` (n, m) in place to x (n, K) at ``classes`` (n, m)."""
        if self.group:
            classes, here = self._columns(x, classes)
            values = values.where(here, 0.0)
        return x.scatter_add_(1, classes, values)

    def _columns(self, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the classes, and whether they are those of this rank. Others have column 0."""
        column = classes - self.first
        here = (column >= 0) & (column < x.shape[1])
        return column.where(here, 0), here

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Values and classes of the k largest entries, at most as many as there are classes."""
        values, columns = largest(Blocks(x), min(k, x.shape[1]))
        if not self.group:
            return values, columns
        missing = min(k, self.largest_shard) - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=NEG_INF)
        columns = torch.nn.functional.pad(columns + self.first, (0, missing))
        # Candidates are in the order of ranks, so that a tie goes to the lowest class.
        candidates, classes = self._side_by_side(values), self._side_by_side(columns)
        values, chosen = largest(Blocks(candidates), min(k, self.classes))
        return values, classes.gather(1, chosen)

    def _side_by_side(self, x: Tensor) -> Tensor:
        """The rows of x (n, m) of all ranks, (n, ranks · m)."""
        ranks, rank = -(-self.classes // self.largest_shard), self.first // self.largest_shard
        slots = x.new_zeros(len(x), ranks, x.shape[1])
        slots[:, rank] = x
        return self.sum(slots).flatten(1)

    def threshold(self, x: Tensor, shape: Tensor | None, phi: Activation) -> Tensor:
        """`solve_threshold` over all classes, (n,), with ``shape`` (n, 1) and largest entries 0."""
        if not self.group:
            return solve_threshold(x, None if shape is None else shape[:, 0], phi)
        steps = enough_steps(x, self.classes, phi)
        # Ranks whose parameters differ by rounding must take equally many steps. The sums of a step
        # carry whether a rank was waiting after the step before.
        waiting, all_done = True, False

        def step(tau: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal all_done
            flag = torch.full_like(tau, float(waiting))
            z, slope, flags = self.sum(torch.stack([*threshold_sums(x, tau, shape, phi), flag]))
            all_done = steps is None and not bool(flags.any())
            return newton_step(z, slope, shape, phi)

        def agreed(done: bool) -> bool:
            nonlocal waiting
            waiting = not done
            return all_done

        return newton(step, x.new_zeros(len(x), 1), steps, agreed)[:, 0]


ALL_CLASSES = ClassShard()


class Options(NamedTuple):
    """Operands of a loss that are the same for all tokens and not tensors."""

    ignore_index: int = -100
    activation: str = ""
    normalize: str = ""
    keep: int | None = None
    softcap: float | None = None
    label_smoothing: float = 0.0
    lse_penalty: float = 0.0
    want_stats: bool = False
    std: float = 1.0  # of the noise

    @property
    def form_rule(self) -> Rule:
        return Rule(ACTIVATIONS[self.activation], self.normalize, self.keep)

    @property
    def sparse(self) -> bool:
        """Whether most entries of ∂loss/∂z are 0."""
        return self.normalize in ("threshold", "select")


class Tokens(NamedTuple):
    """Operands of some tokens."""

    target: Tensor  # [n]
    factor: Tensor  # [n], multiplies the gradient, not the loss
    hidden: Tensor | None  # bool [1|n, K]
    vectors: Vectors  # each [n]
    class_weight: Tensor | None = None  # [V]
    shard: ClassShard = ALL_CLASSES

    @property
    def column(self) -> Tensor:
        """Targets [n, 1]."""
        return self.target[:, None]

    @property
    def shape(self) -> Tensor | None:
        """The shape of φ, [n, 1]."""
        return None if self.vectors.shape is None else self.vectors.shape[:, None]

    def visible(self, x: Tensor) -> Tensor:
        """x [n, K] with 0 for hidden classes."""
        return x if self.hidden is None else x.masked_fill(self.hidden, 0.0)

    def rows(self, part: slice | Tensor) -> Tokens:
        hidden = self.hidden
        if hidden is not None and len(hidden) > 1:
            hidden = hidden[part]
        vectors = Vectors(*(None if x is None else x[part] for x in self.vectors))
        return self._replace(
            target=self.target[part], factor=self.factor[part], hidden=hidden, vectors=vectors
        )


LossRule = Callable[[Tensor, Tokens, list[str], Options], dict[str, Tensor]]
RULES: dict[str, LossRule] = {}


def rule(function: LossRule) -> LossRule:
    """Register a rule under its name, because operators of torch take no Python objects."""
    RULES[function.__name__] = function
    return function
