"""PyTorch operators, each declared by the signature of a function.

    class Vectors(NamedTuple):  # a group of operands that several operators share
        gain: Tensor | None = None
        sink: Tensor | None = None

    class Attended(NamedTuple):
        out: Tensor
        lse: Tensor | None  # None if not requested

    @operator
    def attend(*, q: Tensor, vectors: Vectors, scale: float) -> Attended: ...

    @attend.fake
    def _(*, q: Tensor) -> Attended: ...

    @attend.flops
    def _(*, q: Tensor) -> int: ...

    @attend.backward("q", "gain")
    def attend_backward(
        *, q: Tensor, vectors: Vectors, scale: float, lse: Tensor, dout: Tensor
    ) -> dict[str, Tensor]: ...

    @attend_backward.flops
    def _(*, q: Tensor) -> int: ...

Operands are passed by name. Each field of a group becomes an operand of the torch schema. An
`Activation` or a `Distance` is a string there, its key, because torch operators take no Python
objects.

The parameters of a fake function, and of one that counts operations, are the operands that it
needs.

The parameters of a backward function are operands, outputs and gradients of outputs. The operands
and outputs among them are saved by the forward. The gradient of an output is named ``d`` + the
output's name. Each operand to differentiate must be a parameter of the backward. The backward
returns gradients by operand name. A backward with a parameter ``wanted`` may return only the
gradients named there. The backward is an operator too. Differentiating it raises RuntimeError.

The first operand must be a tensor. An output that was not requested is None. The underlying torch
operator returns a tensor of shape (0,) instead, because torch operators return only tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from attnzoo.backends.flops import add_formula
from attnzoo.core.activation import Activation
from attnzoo.core.checks import runs_eagerly
from attnzoo.core.distance import Distance
from attnzoo.core.function_keys import ACTIVATIONS, DISTANCES

NO_DOUBLE = (
    "attnzoo: this backend supports first derivatives only; for second derivatives, pass "
    "backend='eager', or call modules in `with attnzoo.use_backend('eager'):`"
)

# Types of operands and outputs, and their names in a torch schema.
TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    str: "str",
    str | None: "str?",
    list[str]: "str[]",
    torch.dtype: "ScalarType",
    list[Tensor]: "Tensor[]",
    Activation: "str",
    Distance | None: "str?",
}
# The objects of operands that are keys in the schema
BY_KEY: dict[Any, Any] = {Activation: ACTIVATIONS, Distance | None: DISTANCES}

PLAIN = (Tensor, torch.nn.Parameter)

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """The operator ``attnzoo::name`` for all devices. See the module docstring."""

    def __init__(self, function: Callable[P, R], hints: dict[str, Any], no_gradient: str) -> None:
        self._function, self._no_gradient = function, no_gradient
        self.name = function.__name__
        named = {name: hint for name, hint in hints.items() if name != "return"}
        self._result = hints["return"]
        self._groups: dict[str, Any] = {
            name: hint if _is_group(hint) else None for name, hint in named.items()
        }
        self._operands = _flat_types(named)
        self._outputs = _flat_types({"out": self._result})
        self._optional = tuple(hint == Tensor | None for hint in self._outputs.values())
        kinds = list(self._operands.values())
        self._tensors = [n for n, hint in enumerate(kinds) if hint in (Tensor, Tensor | None)]
        self._by_key = {n: BY_KEY[hint] for n, hint in enumerate(kinds) if hint in BY_KEY}
        # Whether gradients can be recorded without torch's dispatcher, see `_recorded`.
        self._direct = list[Tensor] not in (*kinds, *self._outputs.values())
        self._gradient: Operator[Any, list[Tensor]] | None = None
        self._differentiable: tuple[str, ...] = ()
        # Operands and outputs that the gradient reads, by name: indices into (*operands, *outputs).
        self._saved: dict[str, int] = {}  # tensors
        self._others: dict[str, int] = {}
        # Equivalent to torch.library.custom_op, whose first call would import the compiler and
        # Triton.
        qualified = f"attnzoo::{self.name}"
        inputs_schema = ", ".join(f"{TYPES[hint]} {name}" for name, hint in self._operands.items())
        outputs_schema = ", ".join(TYPES[hint].removesuffix("?") for hint in self._outputs.values())
        tags = (torch.Tag.pt2_compliant_tag,)
        torch.library.define(qualified, f"({inputs_schema}) -> ({outputs_schema})", tags=tags)
        torch.library.impl(qualified, "default", self._implementation)
        torch.library.register_autograd(qualified, self._backward, setup_context=self._save)
        self.overload = getattr(torch.ops.attnzoo, self.name).default

    def __call__(self, *args: P.args, **operands: P.kwargs) -> R:
        values = self.flat(*args, **operands)
        if self._is_plain(values):
            if not self._needs_grad(values):
                return self._function(**operands)  # type: ignore[call-arg]
            if self._direct:
                outputs = self._recorded.apply(*values)
                return self._result(*outputs) if isinstance(outputs, tuple) else outputs
        outputs = self.overload(*self.keyed(values))
        return self._result(*self._or_none(outputs)) if isinstance(outputs, tuple) else outputs

    def flat(self, *args: P.args, **operands: P.kwargs) -> list[Any]:
        """Return the operands in the order of the schema: groups are replaced by their fields."""
        if args or operands.keys() != self._groups.keys():
            raise TypeError(
                f"{self.name} takes the keyword arguments {', '.join(self._groups)}, got "
                f"{', '.join(operands) or 'none'} and {len(args)} positional"
            )
        values: list[Any] = []
        for name, group in self._groups.items():
            value: Any = operands[name]
            if group is None:
                values.append(value)
            elif isinstance(value, group):
                values.extend(value)
            else:
                raise TypeError(f"{self.name}: {name} must be {group.__name__}, got {type(value)}")
        return values

    def keyed(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of ``overload``: activations and distances are replaced by keys."""
        arguments = list(values)
        for n in self._by_key:
            if arguments[n] is not None:
                arguments[n] = arguments[n].key
        return arguments

    def _objects(self, values: Sequence[Any]) -> list[Any]:
        """Undo `keyed`."""
        operands = list(values)
        for n, known in self._by_key.items():
            if isinstance(key := operands[n], str):
                if key not in known:
                    raise ValueError(
                        f"{self.name}: there is no activation or distance {key!r}; create it, or "
                        "load the plugin that does, before this program runs"
                    )
                operands[n] = known[key]
        return operands

    def fake(self, function: Callable[..., R]) -> None:
        """Register a function that creates empty outputs from the operands that it names."""
        names = inspect.signature(function).parameters

        def of_values(*values: Any) -> Any:
            operands = self._named(values)
            return _tensors_only(values[0], function(**{name: operands[name] for name in names}))

        torch.library.register_fake(f"attnzoo::{self.name}", of_values)

    def flops(self, function: Callable[..., int]) -> None:
        """Register a function that counts operations from the operands that it names."""
        names = inspect.signature(function).parameters

        def of_values(*values: Any, out_val: Any) -> int:
            operands = self._named(values)
            return function(**{name: operands[name] for name in names})

        add_formula(self.name, of_values)

    def backward(
        self,
        *differentiable: str,
        like: Callable[[Tensor], Tensor] = lambda x: x.new_empty(x.shape),
        no_double: str = NO_DOUBLE,
    ) -> Callable[[Callable[..., Mapping[str, Tensor]]], Operator[..., list[Tensor]]]:
        """Register the gradients of the operands ``differentiable``.

        ``like`` creates an empty gradient from an operand. ``no_double`` is the text of the error
        that second derivatives raise.
        """

        def register(function: Callable[..., Mapping[str, Tensor]]) -> Operator[..., list[Tensor]]:
            def gradients(*, wanted: list[str], **operands: Any) -> list[Tensor]:
                by_name = function(**operands, **({"wanted": wanted} if asks else {}))
                return [by_name[name] for name in wanted]

            def of_values(*values: Any) -> list[Tensor]:
                operands = dict(zip(gradient._operands, values))
                return [like(operands[name]) for name in operands["wanted"]]

            gradients.__name__ = function.__name__
            hints = get_type_hints(function)
            asks = "wanted" in hints
            hints = {**hints, "wanted": list[str], "return": list[Tensor]}
            gradient = Operator(gradients, hints, no_double)
            assert set(differentiable) <= set(gradient._operands)
            # A missing gradient of an output becomes zeros_like(output), so the output must be
            # saved for the backward.
            for output in self._outputs if len(self._outputs) > 1 else ():
                required = gradient._operands.get(f"d{output}") is Tensor
                assert not required or output in gradient._operands, output
            torch.library.register_fake(f"attnzoo::{gradient.name}", of_values)
            self._gradient, self._differentiable = gradient, differentiable
            assert not self._operands.keys() & self._outputs.keys()
            for n, (name, hint) in enumerate((self._operands | self._outputs).items()):
                if name in gradient._operands:
                    indices = self._saved if hint in (Tensor, Tensor | None) else self._others
                    indices[name] = n
            return gradient

        return register

    def _named(self, values: Sequence[Any]) -> dict[str, Any]:
        """Undo `flat`: return the operands by name, with groups, from the flat list ``values``."""
        items = iter(self._objects(values) if self._by_key else values)
        return {
            name: next(items) if group is None else group(*islice(items, len(group._fields)))
            for name, group in self._groups.items()
        }

    def _or_none(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the outputs, with None for those that were not requested."""
        return [
            None if optional and x.dim() == 1 and x.shape[0] == 0 else x
            for x, optional in zip(outputs, self._optional)
        ]

    def _run(self, *values: Any) -> Any:
        return _tensors_only(values[0], self._function(**self._named(values)))  # type: ignore[call-arg]

    def _is_plain(self, values: list[Any]) -> bool:
        """Whether a call can skip torch's dispatcher, which takes longer than a small kernel."""
        if not runs_eagerly():
            return False
        for n in self._tensors:
            x = values[n]
            if x is not None and (type(x) not in PLAIN or x.is_meta or _is_lazy(x)):
                return False
        return True

    def _needs_grad(self, values: list[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (values[n] for n in self._tensors)
        return any(x is not None and x.requires_grad for x in tensors)

    @cached_property
    def _run_uncompiled(self) -> Callable[..., Any]:
        return torch.compiler.disable(self._run)

    def _implementation(self, *values: Any) -> Any:
        # The compiler must not trace the function. The compiler cannot be active before
        # torch._dynamo is imported.
        run = self._run_uncompiled if "torch._dynamo" in sys.modules else self._run
        return run(*values)

    @cached_property
    def _recorded(self) -> Any:
        """The function as an autograd function, which does what torch.library's would do.

        The one of torch.library looks up the default of each operand in the schema, which takes
        longer than all the rest of a call.
        """

        def forward(ctx: Any, *values: Any) -> Any:
            # Without this, a function that enables gradients would record its operations.
            with torch._C._AutoDispatchBelowAutograd():
                outputs = self._function(**self._named(values))  # type: ignore[call-arg]
            self._save_for_backward(ctx, values, outputs)
            return tuple(outputs) if isinstance(outputs, tuple) else outputs

        # Compiled autograd accepts functions only, not bound methods.
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return self._backward(ctx, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(self.name, (torch.autograd.Function,), methods)

    def _save(self, ctx: Any, inputs: tuple, output: Any) -> None:
        # Objects, not their keys, because an object must live as long as the graph.
        outputs = self._or_none(output) if isinstance(output, tuple) else output
        self._save_for_backward(ctx, self._objects(inputs), outputs)

    def _save_for_backward(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Save what the backward needs. Outputs that were not requested are None."""
        ctx.set_materialize_grads(False)
        if self._gradient is None:
            return
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        known = (*inputs, *outputs)
        ctx.save_for_backward(*[known[n] for n in self._saved.values()])
        ctx.others = [known[n] for n in self._others.values()]
        ctx.requested = [x is not None for x in outputs]

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient = self._gradient
        if gradient is None:
            raise RuntimeError(self._no_gradient)
        if all(grad is None for grad in grads):
            return (None,) * len(self._operands)
        # saved_tensors can be read only once, because a checkpoint discards recomputed tensors.
        operands = dict(zip(self._saved, ctx.saved_tensors))
        operands.update(zip(self._others, ctx.others))
        for output, requested, grad in zip(self._outputs, ctx.requested, grads):
            missing = grad is None and gradient._operands.get(f"d{output}") is Tensor
            grad = torch.zeros_like(operands[output]) if missing else grad
            operands[f"d{output}"] = grad if requested else None
        needs = zip(self._operands, ctx.needs_input_grad)
        wanted = [name for name, needed in needs if needed and name in self._differentiable]
        if not wanted:
            return (None,) * len(self._operands)
        operands["wanted"] = wanted
        values = [operands[name] for name in gradient._operands]
        plain = gradient._is_plain(values) and not gradient._needs_grad(values)
        results = gradient._run(*values) if plain else gradient.overload(*gradient.keyed(values))
        by_name = dict(zip(wanted, results))
        return tuple([by_name.get(name) for name in self._operands])


def operator(function: Callable[P, R]) -> Operator[P, R]:
    """Declare an operator by the signature of the function that computes it."""
    hints = get_type_hints(function)
    return Operator(function, hints, f"attnzoo::{function.__name__} is not differentiable")


def _is_lazy(x: Tensor) -> bool:
    """Whether the dispatcher would replace x: a tensor without storage, or with negated values."""
    lazy = x.is_neg() or x._is_zerotensor()
    # Those of torch.autograd.grad(is_grads_batched=True).
    return lazy or is_legacy_batchedtensor(x)


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple)


def _flat_types(hints: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, hint in hints.items():
        flat |= get_type_hints(hint) if _is_group(hint) else {name: hint}
    return flat


def _tensors_only(first: Tensor, outputs: Any) -> Any:
    """Replace None in the outputs by a tensor of shape (0,), because torch returns only tensors."""
    if not isinstance(outputs, tuple):
        return outputs
    return tuple(first.new_empty(0) if x is None else x for x in outputs)
