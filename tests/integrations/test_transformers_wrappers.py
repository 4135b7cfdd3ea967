"""Wrappers in transformers models."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    T5Config,
    T5Model,
)

from attnzoo.integrations.transformers import convert, revert
from attnzoo.integrations.transformers.masks import make_mask
from attnzoo.nn import OutputGate
from helpers.cases import rand
from helpers.hf_models import (
    GQA,
    bart,
    batch,
    bert,
    generate,
    gpt2,
    ids,
    left_padding,
    llama,
    outputs,
    quiet,
    qwen,
    vit,
)
from helpers.hf_wrappers import EACH, ONE_QUERY, children, wrapped
from helpers.wrappers import MADE, definition

pytestmark = quiet


def recorded(model: Any) -> list[tuple[Tensor, ...]]:
    """(hidden states, q, k, v, output) of each converted layer in one run."""
    calls, hooks = [], []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.append([args[0] if args else kwargs["hidden_states"]])

    def after(child: Any, args: Any, kwargs: Any, out: Any) -> None:
        calls[-1] += [*args, out]

    for module in model.modules():
        if "attnzoo" in module._modules:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.attnzoo.register_forward_hook(after, with_kwargs=True))
    with torch.no_grad():
        model(**{k: x for k, x in batch(model).items() if k != "attention_mask"})
    for hook in hooks:
        hook.remove()
    return [tuple(x.double() for x in call) for call in calls]


# ------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("which", EACH)
@pytest.mark.parametrize("make", [llama, qwen, bert, vit])
def test_layers_compute_the_definition(which: str, make: Any) -> None:
    """From the hidden states, the queries, keys and values of the model; ``qwen`` has windows."""
    model = wrapped(which, make)
    plain = recorded(convert(make(), "softmax"))
    calls = recorded(model)
    assert len(calls) == 2
    for layer, (child, (hidden, q, k, v, out)) in enumerate(zip(children(model), calls)):
        options: dict[str, Any] = {"is_causal": True} if make in (llama, qwen) else {}
        if make is qwen and layer == 1:
            options["window"] = 5
        if "differential" in which:
            assert child.layer == layer
        if layer == 0:
            expected, _ = definition(copy.deepcopy(child).double(), q, k, v, hidden, **options)
            assert torch.allclose(out, expected, atol=1e-4, rtol=1e-4)
    # The first query of each head is that of the model.
    q, theirs = calls[0][1], plain[0][1]
    assert torch.allclose(q.unflatten(1, (4, -1))[:, :, 0], theirs, atol=1e-6)


def test_a_gate_of_one_half_halves_the_output() -> None:
    model = convert(llama(), "softmax", wrapper="output_gate")
    half = llama()
    with torch.no_grad():
        for layer in half.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
    assert torch.allclose(outputs(model), outputs(half), atol=1e-6)


def test_a_mixture_of_one_is_the_model() -> None:
    model = convert(bert(), "softmax", wrapper=("mixture", {"components": 1}))
    assert torch.allclose(outputs(model), outputs(bert()), atol=1e-6)


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}
    return T5Model(T5Config(**sizes, num_heads=4, dropout_rate=0.0)).eval()


def test_a_mixture_of_equal_queries_is_the_model() -> None:
    """T5 names the layer of its queries q, and its bias per head is that of both queries."""
    model = convert(t5(), "softmax", wrapper="mixture")
    with torch.no_grad():
        for layer in (x for x in model.modules() if "attnzoo" in x._modules):
            first, second = layer.q.weight.view(4, 2, 8, 32).unbind(1)
            second.copy_(first)
        inputs = {"input_ids": ids(), "decoder_input_ids": ids(5)}
        assert torch.allclose(model(**inputs)[0], t5()(**inputs)[0], atol=1e-5)


@pytest.mark.parametrize("which", EACH)
def test_generates_the_same_with_and_without_a_cache(which: str) -> None:
    model = wrapped(which, variant="softmax")
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, cache_implementation="static", disable_compile=True),
                       expected)  # fmt: skip


@pytest.mark.parametrize("which", ["differential", "mixture", "gate per head"])
def test_padding_does_not_change_the_outputs(which: str) -> None:
    model = wrapped(which)
    padded = model(ids(), attention_mask=left_padding()).logits[1, 4:]
    alone = model(ids()[1:, 4:]).logits[0]
    assert torch.allclose(padded, alone, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, qwen])
@pytest.mark.parametrize("which", ONE_QUERY)
def test_models_with_other_projections(which: str, make: Any) -> None:
    """GPT-2 makes queries, keys and values with one matrix."""
    model = wrapped(which, make, layers=[1])
    assert not torch.allclose(outputs(model), outputs(make()), atol=1e-3)
    assert torch.equal(outputs(revert(model)), outputs(make()))


def cohere() -> CohereForCausalLM:
    """It rotates features 2p and 2p + 1; Llama rotates p and p + D/2."""
    torch.manual_seed(0)
    config = CohereConfig(**GQA, initializer_range=0.3)
    return CohereForCausalLM(config).eval()


@pytest.mark.parametrize("which", ["differential", "mixture"])
@pytest.mark.parametrize("make", [cohere, lambda: llama(initializer_range=0.3)])
def test_rope_depends_on_distances_only(make: Any, which: str) -> None:
    model = convert(make(), "softmax", wrapper=MADE[which])
    at = torch.arange(12)[None]
    near, far = (model(ids(), position_ids=positions).logits for positions in (at, at + 9))
    assert torch.allclose(near, far, rtol=1e-3, atol=1e-3 * float(near.detach().abs().max()))
    assert not torch.allclose(near, model(ids(), position_ids=2 * at).logits, atol=1e-2)


def test_threads_do_not_mix_their_hidden_states() -> None:
    model = wrapped("gate per element")
    tokens_of_threads = [torch.randint(1, 99, (1, 24)) for _ in range(4)]

    @torch.no_grad()
    def logits_of(tokens: Tensor) -> Tensor:
        return model(tokens).logits

    expected = [logits_of(tokens) for tokens in tokens_of_threads]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(logits_of, 10 * tokens_of_threads))
    for index, logits in enumerate(results):
        assert torch.allclose(logits, expected[index % 4], atol=1e-5)


def test_weights_are_returned() -> None:
    model = wrapped("differential_v2")
    weights = model(ids(), output_attentions=True).attentions
    child, (hidden, q, k, v, _) = children(model)[0], recorded(model)[0]
    _, expected = definition(copy.deepcopy(child).double(), q, k, v, hidden, is_causal=True)
    assert torch.allclose(weights[0].double(), expected, atol=1e-5)


# Models of transformers with a gate: file, attention, and the arguments of `OutputGate`.
SHIPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "laguna per-head": ("laguna", "Laguna", {"per": "head", "activation": "softplus"}),
    "laguna per-element": ("laguna", "Laguna", {"activation": "softplus"}),
    "muse_spark": ("muse_spark", "MuseSparkText", {"norm": True}),
    "beam": ("beam", "Beam", {"bias": True}),
}


@pytest.mark.parametrize("which", SHIPPED)
def test_gates_are_those_of_shipped_models(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name, arguments = SHIPPED[which]
    package = f"transformers.models.{folder}"
    code: Any = pytest.importorskip(f"{package}.modeling_{folder}")
    made: Any = pytest.importorskip(f"{package}.configuration_{folder}")
    laguna = folder == "laguna"
    gating = {"gating": which.removeprefix("laguna ")} if laguna else {}
    config = getattr(made, f"{name}Config")(**{**GQA, "num_hidden_layers": 1}, head_dim=8, **gating)
    config._attn_implementation = "eager"
    heads = {"num_heads": 4} if laguna else {}
    module, x = getattr(code, f"{name}Attention")(config, 0, **heads).double(), rand(2, 6, 32)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * rand(*parameter.shape, seed=index))
    module.o_proj = torch.nn.Identity()
    tensors: list[Tensor] = []
    eager = code.eager_attention_forward

    def recorded(module: Any, *args: Any, **kwargs: Any) -> Any:
        tensors.extend(args[:3])
        return eager(module, *args, **kwargs)

    monkeypatch.setattr(code, "eager_attention_forward", recorded)
    rotation = torch.ones(2, 6, 8), torch.zeros(2, 6, 8)
    expected, _ = module(x, position_embeddings=rotation, attention_mask=None)
    gate = OutputGate("softmax", 4, 32, **arguments).double()
    theirs = {n: p for n, p in module.named_parameters() if n.startswith(("gate", "g_proj"))}
    ours = dict(gate.named_parameters())
    assert len(theirs) == len(ours)
    with torch.no_grad():
        ours["gate.weight"].copy_(theirs.pop(next(n for n in theirs if n.endswith("weight"))))
        for left in theirs.values():
            ours["gate_bias"].copy_(left)
    out = gate(*tensors, scale=module.scaling, **gate.projected(x, x))
    # Their norms and gates are computed in fp32.
    assert torch.allclose(out.transpose(1, 2).flatten(2), expected, atol=1e-5)


def test_xsa_needs_positions() -> None:
    message = "XSA does not support the cross-attention of BartAttention"
    with pytest.raises(ValueError, match=message):
        convert(bart(), "softmax", wrapper="xsa")
    config = convert(llama(), "softmax", wrapper="xsa").config
    step = {"batch_size": 1, "q_length": 1, "kv_length": 8, "q_offset": 3, "config": config}
    with pytest.raises(ValueError, match=r"XSA \(model.layers.0.self_attn\) does not support a st"):
        make_mask(**step, mask_function=lambda batch, head, query, key: key != 1)


# ------------------------------------------------------------------------- training


@pytest.mark.parametrize("which", EACH)
def test_all_parameters_get_gradients(which: str) -> None:
    """Also with checkpointing, where layers run twice."""
    gradients = []
    for checkpointing in (False, True):
        model = wrapped(which).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids(), labels=ids()).loss.backward()
        named = {name: x.grad for name, x in model.named_parameters()}
        assert all(g is not None and bool(g.any()) for g in named.values())
        gradients.append(named)
    first, second = gradients
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("which", MADE)
def test_compiles_as_one_graph(which: str) -> None:
    model = wrapped(which)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(ids()).logits, model(ids()).logits, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("which", MADE)
def test_bf16(which: str) -> None:
    """All parameters have the dtype of the model."""
    model = convert(llama().bfloat16(), "ssmax", wrapper=MADE[which])
    assert model(ids()).logits.dtype == torch.bfloat16
    assert {x.dtype for x in children(model)[0].parameters()} == {torch.bfloat16}
