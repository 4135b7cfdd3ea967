"""use_backend() chooses the backend of modules, which take no argument ``backend``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attnzoo
from attnzoo.backends import BACKENDS
from attnzoo.nn import Attention, KVCache, MultiheadAttention, StateCache, Transformer
from helpers.cases import rand
from helpers.hf_models import ids, llama

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the backends that have run."""
    names: list[str] = []
    for name, known in list(BACKENDS.items()):

        def record(*args: Any, name: str = name, original: Any = known.run) -> Any:
            names.append(name)
            return original(*args)

        monkeypatch.setitem(BACKENDS, name, replace(known, run=record))
    return names


def inputs(n: int = 300) -> list[Tensor]:
    return [rand(1, 2, n, 8, seed=i).float() for i in range(3)]


def packed() -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in inputs())
    ends = torch.tensor([0, 100, 300], dtype=torch.int32)
    return attnzoo.varlen_attention(q, k, v, ends, ends, 200, 200, "sink", b=0.1)


def replaced() -> Tensor:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    attnzoo.nn.replace(layer, "sink")
    return layer(rand(1, 300, 16).float())


def decoded() -> Tensor:
    cache, (q, k, v) = KVCache(300), inputs()
    return attnzoo.nn.attend(cache, q, k, v, "sink", b=0.1)


def multihead() -> Tensor:
    layer, x = MultiheadAttention(16, 2, variant="sink", batch_first=True), rand(1, 300, 16).float()
    return layer(x, x, x, need_weights=False)[0]


def converted() -> Tensor:
    from attnzoo.integrations.transformers import convert

    return convert(llama(), "sink")(ids(200)).logits


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: attnzoo.attention(*inputs(), "sink", b=0.1),
    "segments": lambda: attnzoo.attention(
        *inputs(), "sink", b=0.1, segment_ids=torch.arange(300)[None] // 150
    ),
    "varlen": packed,
    "module": lambda: Attention("sink", 2)(*inputs()),
    "multihead": multihead,
    "wrapper": lambda: Transformer(10, 16, 2, 1, "sink", wrapper="differential")(
        torch.zeros(1, 300, dtype=torch.long)
    ),
    "transformer": lambda: Transformer(10, 16, 2, 1, "sink")(torch.zeros(1, 300, dtype=torch.long)),
    "replaced": replaced,
    "cache": decoded,
    "converted": converted,
}


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("call", CALLS)
def test_holds_for_all_calls(call: str, backend: str, ran: list[str]) -> None:
    with torch.no_grad(), attnzoo.use_backend(backend):
        CALLS[call]()
    assert set(ran) == {backend}


def test_argument_comes_first_and_contexts_nest(ran: list[str]) -> None:
    q, k, v = inputs(5)
    with attnzoo.use_backend("tiled"):
        attnzoo.attention(q, k, v)
        attnzoo.attention(q, k, v, backend="eager")
        with attnzoo.use_backend("linear"):
            attnzoo.attention(q, k, v, "elu")
            assert attnzoo.explain(q, k, v, "elu").chosen == "linear"
            with attnzoo.use_backend(None):
                attnzoo.attention(q, k, v)
        with pytest.raises(ZeroDivisionError), attnzoo.use_backend("eager"):
            raise ZeroDivisionError
        attnzoo.attention(q, k, v)
    attnzoo.attention(q, k, v)
    assert ran == ["tiled", "eager", "linear", "sdpa", "tiled", "sdpa"]


@pytest.mark.parametrize("name", ["dense", "", 3, True])
def test_unknown_name_raises_and_changes_nothing(name: Any) -> None:
    q, k, v = inputs(5)
    context = attnzoo.use_backend(name)
    with pytest.raises(ValueError, match="backend must be None or one of sdpa, "), context:
        raise AssertionError("entered")
    assert attnzoo.explain(q, k, v).chosen == "sdpa"


def test_backend_that_cannot_run_raises() -> None:
    layer = Attention("sink", 2)
    with attnzoo.use_backend("sdpa"), pytest.raises(ValueError, match="backend 'sdpa' cannot run"):
        layer(*inputs(5))


def test_threads_choose_on_their_own(ran: list[str]) -> None:
    q, k, v = inputs(5)
    with attnzoo.use_backend("tiled"):
        thread = threading.Thread(target=lambda: attnzoo.attention(q, k, v))
        thread.start()
        thread.join()
        attnzoo.attention(q, k, v)
    assert ran == ["sdpa", "tiled"]


@pytest.mark.interpreter
def test_states_run_on_the_named_backend_or_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(5)
    scans: list[str] = []
    for name in ("linear", "flash_linear"):

        def scan(*args: Any, name: str = name, original: Any = BACKENDS[name].scan) -> Any:
            scans.append(name)
            return original(*args)

        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], scan=scan))
    for name in ("linear", "flash_linear"):
        with attnzoo.use_backend(name):
            attnzoo.linear_attention(q, k, v, "elu")
            attnzoo.nn.attend(StateCache(), q, k, v, "elu")
    assert scans == ["linear", "linear", "flash_linear", "flash_linear"]
    with attnzoo.use_backend("eager"):
        with pytest.raises(ValueError, match=r"'eager' of use_backend .* caches of keys"):
            attnzoo.linear_attention(q, k, v, "elu")
        attnzoo.nn.attend(KVCache(5), q, k, v, "elu")


def test_gradient_penalty_of_a_module() -> None:
    layer = MultiheadAttention(16, 2, variant="sink", batch_first=True).double()
    x = rand(1, 300, 16).requires_grad_()

    def penalty(x: Tensor) -> Tensor:
        out = layer(x, x, x, need_weights=False)[0]
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().sum()

    with pytest.raises(RuntimeError, match=r"with attnzoo.use_backend\('eager'\)"):
        penalty(x).backward()
    with attnzoo.use_backend("eager"):
        value = penalty(x)
    value.backward()  # the choice was made in the forward
    gradient, direction, ends = x.grad, rand(1, 300, 16, seed=1), []
    assert gradient is not None
    for step in (1e-5, -1e-5):
        moved = (x + step * direction).detach().requires_grad_()
        with attnzoo.use_backend("eager"):
            ends.append(penalty(moved).item())
    expected = (ends[0] - ends[1]) / 2e-5
    assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_with_its_backward_inside(reentrant: bool, ran: list[str]) -> None:
    layer = Attention("sink", 2)
    q, k, v = (x.requires_grad_() for x in inputs())
    with attnzoo.use_backend("eager"):
        checkpoint(layer, q, k, v, use_reentrant=reentrant).sum().backward()
    assert ran == ["eager", "eager"]


@pytest.mark.slow
def test_compiled_code_follows_each_choice() -> None:
    layer, (q, k, v) = Attention("sink", 2), inputs()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)

    def operators() -> bool:
        return any("tiled_forward" in str(node.target) for node in graphs.graphs[-1].graph.nodes)

    choices = ("eager", False, 1), (None, True, 2), ("eager", True, 2), ("tiled", True, 3)
    for name, tiled, count in (*choices, (None, True, 3)):
        with attnzoo.use_backend(name):
            assert torch.allclose(compiled(q, k, v), layer(q, k, v), atol=1e-6)
        assert (operators(), graphs.frame_count) == (tiled, count)


def test_context_inside_of_compiled_code() -> None:
    layer, (q, k, v) = Attention("sink", 2), inputs()
    graphs = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=graphs)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attnzoo.use_backend("eager"):
            return layer(q, k, v)

    assert torch.allclose(attend(q, k, v), layer(q, k, v), atol=1e-6)
    assert not [n for n in graphs.graphs[0].graph.nodes if "tiled" in str(n.target)]
    assert attnzoo.explain(q, k, v, "sink", b=0.1).chosen == "tiled"


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_export_follows_the_choice(strict: bool) -> None:
    layer, args = Attention("sink", 2), tuple(inputs())
    for name, tiled in ((None, True), ("eager", False)):
        with attnzoo.use_backend(name):
            program = torch.export.export(layer, args, strict=strict)
        assert ("tiled_forward" in str(program)) == tiled
        assert torch.allclose(program.module()(*args), layer(*args), atol=1e-6)
