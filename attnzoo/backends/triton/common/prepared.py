"""Runs launches, and reuses their description for calls with the same shapes and settings.

A ``describe`` function computes a launch's arguments from the operands of a call, and Triton then
looks up the compiled kernel by the types of all arguments. Both take longer than a small kernel
runs. They depend only on the operands' shapes, strides, dtypes, alignment and settings. The second
call with equal ones is recorded as a `Prepared`, and later calls only allocate the results and fill
in pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnzoo.backends.triton.common.groups import mapped
from attnzoo.backends.triton.common.launch import Launch, on_device, run
from attnzoo.core.function_keys import Keyed

MOST = 1024  # number of different calls that are remembered

# Types of most operands. `isinstance` with Tensor takes longer than this look-up.
HASHED = frozenset((type(None), bool, int, float, str))

R = TypeVar("R")
_prepared: dict[Hashable, Prepared] = {}
_seen: set[Hashable] = set()


def launch(describe: Callable[..., tuple[Launch | list[Launch], R]], *operands: Any) -> R:
    """Run the launches that ``describe(*operands)`` returns, and return its results.

    ``describe`` must not read or initialize tensors.
    """
    inputs: list[Tensor] = []
    parts: list[Hashable] = [describe]
    _read(operands, parts, inputs, {})
    key = tuple(parts)
    ready = _prepared.get(key)
    if ready is not None:
        return ready.run(inputs)
    work, results = describe(*operands)
    launches = [work] if isinstance(work, Launch) else work
    kernels = [run(each) for each in launches]
    if len(_seen) >= MOST:
        clear()
    if key not in _seen:
        _seen.add(key)
    elif None not in kernels and not _has_views(launches, inputs):
        _prepared[key] = Prepared(launches, kernels, results, inputs)
    return results


def clear() -> None:
    """Forget all prepared calls."""
    _seen.clear()
    _prepared.clear()


def _read(
    values: Iterable[Any], key: list[Hashable], inputs: list[Tensor], numbers: dict[int, int]
) -> None:
    """Add everything that a launch depends on to ``key``, except the addresses of tensors.

    ``inputs`` receives the tensors. ``numbers`` counts them: two operands may be the same tensor.
    """
    for x in values:
        kind = type(x)
        if kind in HASHED:
            key.append(x)
        elif isinstance(x, Tensor):
            inputs.append(x)
            key += (
                numbers.setdefault(id(x), len(numbers)), x.shape, x.stride(), x.dtype, x.device,
                x.data_ptr() % 16,
            )  # fmt: skip
        elif isinstance(x, (tuple, list)):
            _read(x, key, inputs, numbers)
        elif isinstance(x, Keyed):  # whose functions may hold large objects
            key.append(x.of_kernels)
        else:
            key.append(x)


def _has_views(launches: list[Launch], inputs: list[Tensor]) -> bool:
    """Whether an argument is a view of another tensor, instead of an operand or a new tensor."""
    used: dict[int, Tensor] = {}
    for each in launches:
        mapped(
            lambda x, path: used.setdefault(id(x), x) if isinstance(x, Tensor) else None,
            tuple(each.args.values()),
        )
    new = [x for name, x in used.items() if all(x is not y for y in inputs)]
    addresses = [x.untyped_storage().data_ptr() for x in (*inputs, *new) if x.numel()]
    fresh = {x.untyped_storage().data_ptr() for x in new if x.numel()}
    return any(addresses.count(address) > 1 for address in fresh)


class Prepared:
    """The compiled kernels of a call, and which tensors are among their arguments."""

    def __init__(
        self, launches: list[Launch], kernels: list[Any], results: Any, inputs: list[Tensor]
    ) -> None:
        self.device = inputs[0].device
        self.allocations: list[Callable[[], Tensor]] = []
        known = list(inputs)
        for x in (x for each in launches for x in each.zeroed):
            self._index_of(x, known)
        self.zeroed = len(self.allocations)  # so many of the first are set to 0
        self.names = tuple(results) if isinstance(results, dict) else None
        values = tuple(results.values()) if isinstance(results, dict) else results
        self.results = self._template([values], known, named=True)
        self.calls = []
        for each, kernel in zip(launches, kernels):
            values = [each.args[param.name] for param in each.kernel.params]
            self.calls.append((kernel[each.programs, 1, 1], self._template(values, known)))

    def _template(self, values: list[Any], known: list[Tensor], named: bool = False) -> Template:
        """``named``: True for results, which stay NamedTuples.

        Kernels get plain tuples, which are faster to make.
        """
        template = Template(values, [], [], [])
        for n, x in enumerate(values):
            if isinstance(x, Tensor):
                template.tensors.append((n, self._index_of(x, known)))
                values[n] = None
            elif isinstance(x, tuple):
                if any(isinstance(y, (Tensor, tuple)) for y in x):
                    kind = getattr(x, "_make", tuple) if named else tuple
                    template.groups.append((n, kind, self._template(list(x), known, named)))
                    values[n] = None
            elif hasattr(x, "base"):  # a TMA descriptor
                template.descriptors.append((n, self._index_of(x.base, known)))
                values[n] = _descriptor_of(x, None)
        return template

    def _index_of(self, x: Tensor, known: list[Tensor]) -> int:
        """The index of x in the list of inputs and new tensors; x is added if it is new."""
        for n, other in enumerate(known):
            if other is x:
                return n
        memory = {"dtype": x.dtype, "device": x.device}
        self.allocations.append(partial(torch.empty_strided, x.shape, x.stride(), **memory))
        known.append(x)
        return len(known) - 1

    def run(self, inputs: list[Tensor]) -> Any:
        new = [allocate() for allocate in self.allocations]
        for x in new[: self.zeroed]:
            x.zero_()
        tensors = inputs + new
        with on_device(self.device):
            for kernel, template in self.calls:
                kernel(*_filled(template, tensors))
        (results,) = _filled(self.results, tensors)
        return results if self.names is None else dict(zip(self.names, results))


class Template(NamedTuple):
    """Arguments of a kernel, fields of a group, or results, and indices of the tensors in them."""

    values: list[Any]
    tensors: list[tuple[int, int]]
    descriptors: list[tuple[int, int]]  # of TMA
    groups: list[tuple[int, Callable[[list[Any]], Any], Template]]


def _filled(template: Template, tensors: list[Tensor]) -> list[Any]:
    values, indices, descriptors, groups = template
    filled = values.copy()
    for n, index in indices:
        filled[n] = tensors[index]
    for n, index in descriptors:
        filled[n] = _descriptor_of(values[n], tensors[index])
    for n, kind, group in groups:
        filled[n] = kind(_filled(group, tensors))
    return filled


def _descriptor_of(described: Any, base: Tensor | None) -> Any:
    """A copy of a TMA descriptor for another tensor. Four times as fast as `copy.copy`."""
    made = object.__new__(type(described))
    made.__dict__.update(described.__dict__, base=base)
    return made
