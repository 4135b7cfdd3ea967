"""Modules made on the meta device, whose `reset_parameters` must set every tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attnzoo.nn
from attnzoo.nn import Attention, MultiheadAttention, OutputLayer, Transformer
from attnzoo.nn.parameters import VariantParameters
from helpers.cases import CASES, VARIANTS, learned, params_of

START = torch.tensor([1.1, 1.2, 1.3, 1.4])
HEADS = 3  # two ranks get different numbers of heads


def attention(variant: str, learn: bool) -> Attention:
    """Learns all parameters that the variant can learn, or holds their values as buffers."""
    with torch.device("cpu"):
        starts = learned(variant, HEADS)
    options = {**params_of(variant), **starts}
    return Attention(variant, HEADS, learn=tuple(starts) if learn else (), **options)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, HEADS, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return attnzoo.nn.replace(model, "entmax", learn=("alpha",), alpha=1.3)


def transformer(variant: Any = "ssmax", **options: Any) -> Transformer:
    return Transformer(19, 24, HEADS, 2, variant, **options)


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"{v} learned": lambda v=v: attention(v, True) for v in VARIANTS if CASES[v].learned},
    **{f"{v} fixed": lambda v=v: attention(v, False) for v in VARIANTS if CASES[v].learned},
    **{
        f"{name} of ssmax": lambda kind=kind: kind("ssmax", HEADS, 24, layer=1)
        for name, kind in attnzoo.nn.WRAPPERS.items()
    },
    "gate with a bias": lambda: attnzoo.nn.OutputGate("softmax", HEADS, 24, bias=True),
    "gated xsa": lambda: attnzoo.nn.XSA("softmax", HEADS, 24, gated=True),
    "output gate of forgetting": lambda: attnzoo.nn.OutputGate("forgetting", HEADS, 24),
    "Taylor": lambda: attnzoo.nn.Taylor(24, HEADS, bias=True),
    "RelativeBias": lambda: attnzoo.nn.RelativeBias(HEADS),
    "MultiheadAttention": lambda: MultiheadAttention(24, HEADS, variant="sink", add_bias_kv=True),
    "separate projections": lambda: MultiheadAttention(24, HEADS, kdim=8, variant="forgetting"),
    "differential layer": lambda: MultiheadAttention(24, HEADS, wrapper="differential"),
    "encoder": encoder,
    "Transformer": lambda: transformer(qk_norm=True, layer_scale=1e-4),
    "two variants": lambda: transformer(["hedgehog", ("entmax", {"learn": ("alpha",)})]),
    "asentmax": lambda: transformer("asentmax", wrapper="mixture"),
    "entmax output": lambda: transformer(
        output="entmax", output_params={"learn": ("alpha",), "bias": True}
    ),
    "own output": lambda: transformer(output=OutputLayer(24, 19, "sink")),
    "OutputLayer": lambda: OutputLayer(24, 19, "entmax", learn=("alpha",)),
    "MixtureOutput": lambda: attnzoo.nn.MixtureOutput(24, 19, 3, "ssmax"),
    "AdaptiveSoftmax": lambda: attnzoo.nn.AdaptiveSoftmax(24, 19, [5, 9], "sink"),
}  # fmt: skip


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def emptied(make: Callable[[], nn.Module], prepare: Callable[[nn.Module], Any]) -> nn.Module:
    """The module after `reset_parameters`. Before, all its tensors were NaN."""
    with torch.device("meta"):
        module = make()
    prepare(module)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for x in tensors(module).values():
            x.fill_(float("nan"))
    reset(module)
    return module


def reset(module: nn.Module) -> None:
    """Resets the module; one of torch that cannot, child by child."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # pyright: ignore
    elif isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
    else:
        for child in module.children():
            reset(child)


def wrong(module: nn.Module, expected: nn.Module) -> list[str]:
    """Names of tensors that are NaN, and of parameters of variants with other initial values."""
    full_tensors = {name: full(x) for name, x in tensors(module).items()}
    names = [name for name, x in full_tensors.items() if not bool(x.isfinite().all())]
    for name, part in expected.named_modules():
        if isinstance(part, VariantParameters):
            ids = {id(x) for x in part.parameter_tensors().values()}
            starts = {f"{name}.{n}".strip("."): x for n, x in tensors(part).items() if id(x) in ids}
            names += [n for n, x in starts.items() if not torch.equal(full_tensors[n], x)]
    return names


def full(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def wrong_on_ranks(rank: int) -> dict[str, list[str]]:
    """The result of `wrong` for each module that FSDP2 shards, and for heads sharded before."""
    mesh = init_device_mesh("cpu", (2,))
    names = {}
    for name, make in MODULES.items():
        module = emptied(make, lambda module: fully_shard(module, mesh=mesh))
        names[name] = wrong(module, make())
    for shape in ((1, 2), (2, 1)):
        both = init_device_mesh("cpu", shape, mesh_dim_names=("data", "heads"))

        def shard(module: Any, both: Any = both) -> None:
            fully_shard(module.shard_heads(both["heads"]), mesh=both["data"])

        make = lambda: Attention("entmax", 4, learn=("alpha",), alpha=START)  # noqa: E731
        names[f"heads {shape}"] = wrong(emptied(make, shard), make())
    return {name: wrongs for name, wrongs in names.items() if wrongs}
