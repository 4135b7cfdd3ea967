"""The classes of an output layer that a process holds, and results over all classes.

Usually a process holds all classes. `sharded.ShardOfRank` is for a matrix whose rows are shared
out over ranks: each rank has the logits of its own classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.core.activations import Activation
from attnzoo.functional.largest import Blocks, largest


class ClassShard:
    """All classes. Rows of scores are (n, K) for the K classes of this process."""

    whole = True

    def fields(self) -> dict[str, Any]:
        """What `operators.Setting` needs to make this object again."""
        return {}

    def total(self, here: int) -> int:
        """The number of all classes, from the number of those in this process."""
        return here

    def most(self, here: int) -> int:
        """The largest number of classes in a process."""
        return here

    def own(self, x: Tensor) -> Tensor:
        """The entries of the classes of this process, from (…, V) to (…, K)."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """A sum over all classes, from the sum over the classes of this process."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """The largest over all classes, from the largest of this process."""
        return x

    def at(self, x: Tensor, classes: Tensor) -> Tensor:
        """The entries of x (n, K) at one class per row, (n, 1)."""
        return x.gather(1, classes)

    def add_at(self, x: Tensor, classes: Tensor, values: Tensor) -> Tensor:
        """Add ``values`` (n, m) in place to x (n, K) at ``classes`` (n, m)."""
        return x.scatter_add_(1, classes, values)

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Values and classes of the k largest entries, at most as many as there are classes."""
        return largest(Blocks(x), min(k, x.shape[1]))

    def threshold(self, x: Tensor, shape: Tensor | None, phi: Activation) -> Tensor:
        """`solve_threshold` over all classes, (n,). The largest entry of each row is 0."""
        return solve_threshold(x, shape, phi)


WHOLE = ClassShard()
