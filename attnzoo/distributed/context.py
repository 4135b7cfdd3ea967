"""context_parallel_attention(): attention over a sequence whose tokens are on several ranks."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnzoo.backends.selection import check_backend
from attnzoo.core.arguments import ARGUMENTS, check_tensors
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import check_bool, shown
from attnzoo.core.collectives import Ranks
from attnzoo.core.forms import Linear
from attnzoo.core.rank_agreement import agreed, described, ranks_of
from attnzoo.distributed.gather_methods import Result, all_gather_attention, ulysses_attention
from attnzoo.distributed.inputs import Inputs
from attnzoo.distributed.layout import Layout, shards_of
from attnzoo.distributed.ring_method import chunks_of, circulating_form, ring_method
from attnzoo.functional.prepare import ValidatedCall, cast_by_autocast, check_supported, prepare
from attnzoo.functional.use_backend import named_backend

Method = Literal["auto", "ulysses", "all_gather", "ring"]
METHODS = get_args(Method)
NAME = "context_parallel_attention"


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    mesh: DeviceMesh,
    method: Method = "auto",
    layout: Layout = "zigzag",
    backend: str | None = None,
    **arguments: Any,
) -> Any:
    """`attnzoo.attention` over a sequence whose tokens are sharded over the ranks of a mesh.

    Each rank passes its shard of the sequence and gets the output of its tokens. Positions,
    windows, ALiBi, segments, masks, sinks and n_i are those of the whole sequence.

    ============  ===========================================  ===================================
    method        what is sent                                 runs
    ============  ===========================================  ===================================
    "ulysses"     tokens are exchanged for heads before the    every variant, on any backend
                  attention, and back after it
    "all_gather"  all keys and values                          every variant; on any backend if
                                                               causal, else `tiled` or `eager`
    "ring"        keys and values, from rank to rank; of       variants with a pairwise or linear
                  linear forms only the states                 form, except top-k and top-p; in
                                                               PyTorch (`tiled`, `linear`)
    ============  ===========================================  ===================================

    With "ring" no rank holds all keys. Without a backend, "auto" is "ring" for a linear form that
    runs from states (`linear` supports the call). Else it is "ulysses" if the number of query heads
    is a multiple of that of the ranks, else "all_gather".

    Args:
        q: The rank's queries (B, H, N/R, D) of a sequence of N tokens on R ranks.
        k: Its keys (B, Hkv, N/R, D).
        v: Its values (B, Hkv, N/R, Dv).
        variant: A name from `list_variants`.
        mesh: A one-dimensional `torch.distributed.device_mesh.DeviceMesh` of these ranks.
        method: One of the names in the table.
        layout: "contiguous": rank r has the tokens r·N/R … (r + 1)·N/R − 1. "zigzag": it has the
            chunks r and 2R − 1 − r of 2R equal chunks, so that causal work is balanced. `shard`
            makes both.
        backend: As for `attention`; must be None with "ring".
        **arguments: The other arguments of `attention`, and parameters of the variant. Parameters
            of shape () or (H,), ``alibi``, ``relative_bias`` and tensors of feature maps are passed
            whole. Key masks, ``segment_ids`` and parameters per query or per key are shards. A
            dense mask is (…, N/R, N), with all keys in the order of the sequence.

    Returns:
        The output (B, H, N/R, Dv) in q's dtype, or a pair (output, lse), as for `attention`.
        ``return_max_logits`` is not supported.

    Raises:
        ValueError: An argument is wrong, the ranks pass different arguments, or the method does not
            support the call. Every rank raises.
        TypeError: An argument has a wrong type or dtype. The other ranks raise ValueError.

    Example:
        >>> import torch, attnzoo
        >>> import torch.distributed as dist
        >>> from attnzoo.distributed import context_parallel_attention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
        >>> context_parallel_attention(q, k, v, "ssmax", mesh=mesh, is_causal=True).shape
        torch.Size([1, 2, 8, 16])
        >>> dist.destroy_process_group()

    References:
        Jacobs et al. 2023, arXiv:2309.14509 (Ulysses). Liu et al. 2023, arXiv:2310.01889 (ring).

    Notes:
        The gradients of tensors that are passed whole are partial sums, one per rank; add them up
        over the ranks. Dropout draws from each rank's own generator: seed the ranks differently,
        or their weights are dropped at equal places. A call whose ranks disagree raises on all
        ranks; this costs one small exchange per call.
    """
    ranks, backend = ranks_of(mesh), named_backend(backend)

    def check() -> tuple[tuple[Inputs, ValidatedCall], str]:
        inputs, local = _checked(q, k, v, variant, arguments, ranks, method, layout, backend)
        return (inputs, local), _description(inputs, method, layout, backend)

    inputs, local = agreed(NAME, ranks, check)
    out, lse = _attend(inputs, local, method, backend)
    return (out, lse) if local.call.return_lse else out


def check_method(method: Any) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {shown(method)}")


def _attend(inputs: Inputs, local: ValidatedCall, method: str, backend: str | None) -> Result:
    if method == "auto":
        method = _choice(inputs, local, backend)
    full_inputs = inputs.with_all_key_data()
    if method == "ulysses":
        return ulysses_attention(inputs, full_inputs, backend)
    # The chunks are checked with all keys, so that every rank raises if one does.
    readies = chunks_of(inputs, full_inputs)
    for ready in readies:
        check_supported(ready)
    with in_full_precision(local.call.device):
        forms = [ready.forms for ready in readies]  # a variant may raise when it makes them
    if method == "all_gather":
        return all_gather_attention(inputs, full_inputs, backend)
    pairs = zip(readies, forms, strict=True)
    return ring_method(inputs, readies, [circulating_form(inputs, *pair) for pair in pairs])


def _choice(inputs: Inputs, local: ValidatedCall, backend: str | None) -> str:
    """The method that "auto" stands for. It is the same on all ranks."""
    linears = [form for form in local.forms if isinstance(form, Linear)]
    if backend is None and linears and inputs.sums_states(linears[0], local.call):
        return "ring"
    return "ulysses" if local.call.heads % inputs.ranks.count == 0 else "all_gather"


def _checked(
    q: Any, k: Any, v: Any, variant: Any, arguments: dict[str, Any], ranks: Ranks, method: Any,
    layout: Any, backend: Any,
) -> tuple[Inputs, ValidatedCall]:  # fmt: skip
    """The validated arguments, and the call as if the shard were the whole sequence."""
    check_method(method)
    check_backend(backend)
    if method == "ring" and backend is not None:
        raise ValueError(f"backend must be None with method 'ring', got {shown(backend)}")
    before, (q, k, v) = q, cast_by_autocast(q, k, v)
    check_tensors("B, H, N, D", {"q": q, "k": k, "v": v})
    if q.device.type != ranks.mesh.device_type:
        raise ValueError(
            f"q must be on the device type of the mesh, {ranks.mesh.device_type}, got {q.device}"
        )
    local = q.shape[2]
    if k.shape[2] != local:
        raise ValueError(f"q and k must have equal lengths, got {local} and {k.shape[2]}")
    shards = shards_of(layout, ranks.count, local)
    if check_bool("return_max_logits", arguments.get("return_max_logits", False)):
        raise ValueError("return_max_logits must be False for a sharded sequence, got True")
    common = {name: value for name, value in arguments.items() if name in ARGUMENTS}
    params = {name: value for name, value in arguments.items() if name not in ARGUMENTS}
    mask = common.get("attn_mask")
    if q is not before and isinstance(mask, Tensor) and mask.dtype == before.dtype:
        common["attn_mask"] = mask.float()
    inputs = Inputs(q, k, v, variant, common, params, shards, ranks)
    checked = dict(common)
    if isinstance(mask := common.get("attn_mask"), Tensor) and not inputs.has_key_mask():
        total = inputs.shards.total
        of_queries = mask.dim() > 1 and mask.shape[-2] == local
        if not of_queries or mask.shape[-1] not in (1, total):
            raise ValueError(
                f"attn_mask must be a key mask (…, 1, {local}) of the shard, or (…, {local}, "
                f"{total}) with all keys of the sequence, got {tuple(mask.shape)}"
            )
        checked["attn_mask"] = mask[..., :local]
    return inputs, prepare(q, k, v, variant, checked | params)


def _description(inputs: Inputs, method: str, layout: str, backend: str | None) -> str:
    names = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "variant": inputs.variant}
    options = {"method": method, "layout": layout, "backend": backend}
    return described(names | options | inputs.arguments | inputs.params)
