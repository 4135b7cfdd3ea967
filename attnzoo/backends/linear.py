"""Runs linear forms as a scan over chunks in PyTorch. Time is linear in N.

Products ψ(q)·ψ(k) are computed directly within a chunk. Keys of earlier chunks contribute through
the state: Σ ψ(k) vᵀ, with Σ ψ(k) as an extra column. If gradients are needed, each chunk is
checkpointed, so that only the states between chunks are kept. In a graph with symbolic lengths,
which cannot have a loop over chunks, all chunks are computed at once, and all states stored.

With segments, the tokens of a segment lie side by side (`packed_tokens`). The state between two
chunks is the sum over the keys of the segment that reaches across, so it begins anew with each
segment. Without causality a second scan, from the last chunk to the first, adds the later keys.

On a CPU, `run` uses fp64 for forms whose sums may lose digits to cancellation (`Linear.cancels`). A
state returned to the caller is fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.backends.base import Backend
from attnzoo.backends.packed_tokens import features_at, in_one_sequence
from attnzoo.core.call import Call
from attnzoo.core.checks import is_symbolic
from attnzoo.core.device import is_cpu
from attnzoo.core.forms import Form, Linear, NoForm

CHUNK = 128


def chunk_length(size: int, needs_grad: bool) -> int:
    """Return the number of tokens per chunk on a CPU: `CHUNK` if no gradient is needed.

    If gradients are needed, the number grows with the number of features, ``size``, from `CHUNK` to
    4 · `CHUNK`.
    """
    return max(CHUNK, min(4 * CHUNK, size // 4)) if needs_grad else CHUNK


def tokens_per_chunk(form: Linear, call: Call) -> int:
    """The number of tokens per chunk; 4 · `CHUNK` on a GPU, where each operation is a launch."""
    if is_cpu(call.device):
        return chunk_length(form.size(call.head_dim), call.needs_grad)
    return 4 * CHUNK


@dataclass(frozen=True)
class LinearState:
    """The state of a causal linear variant. Its size does not depend on the number of keys.

    Args:
        sums: (B, Hkv, F, Dv + 1): Σ ψ(k) vᵀ, with Σ ψ(k) as the last column. fp32, or fp64 for fp64
            inputs. (B, H, F, Dv + 1) if the mask or the features differ between the heads
            of a group.
        length: number of keys seen so far.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 8, 256, 64).unbind()
        >>> _, state = attnzoo.linear_attention(q, k, v, "cosformer", max_length=4096)
        >>> tuple(state.sums.shape), state.length
        ((1, 8, 128, 65), 256)
    """

    sums: Tensor
    length: int


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, NoForm):
        return form.why
    if not isinstance(form, Linear):
        return "supports linear forms only"
    if call.mask is not None and not call.key_mask:
        return "does not support a dense mask, only a key mask (query dimension 1)"
    if call.softcap is not None:
        return "does not support softcap: there is no score to cap"
    if call.has_bias:
        return "does not support a float mask, alibi or relative_bias: there is no score to add to"
    if call.left is not None or call.right not in (None, 0):
        return "does not support a window: keys cannot be removed from a state"
    if call.segments is not None and is_symbolic(call.queries, call.keys):
        return "does not support segment_ids in a graph with dynamic lengths"
    if call.dropout_p:
        return "does not support dropout (tiled does)"
    if call.return_lse:
        return "does not support return_lse: there are no exponentials to sum"
    return None


def sums_in_fp64(form: Linear, call: Call) -> bool:
    """True if sums over fp16, bf16 or fp32 inputs are computed in fp64.

    This is so on a CPU, for forms whose sums may lose digits to cancellation (`Linear.cancels`).
    fp64 takes twice as long as fp32 on a CPU, but 64 times as long on many GPUs.
    """
    return form.cancels and call.dtype != torch.float64 and call.device.type == "cpu"


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, None]:
    assert isinstance(form, Linear)
    if sums_in_fp64(form, call):
        call = replace(call, dtype=torch.float64)
    if call.segments is not None and call.queries:
        return _attend_segments(q, k, v, call, form), None
    attend = scan if call.right == 0 else _attend_all
    return attend(q, k, v, call, form)[0], None


def scan(
    q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention. Return the output (B, H, Nq, Dv), and the state after all keys."""
    call, k, v, sums = prepare(call, k, v, sums, form)
    keyless, lead = offsets(call)
    state = _absorb(k[:, :, :lead], v[:, :, :lead], call, form, sums, call.key_origin)
    out = [_zero_rows(v, call, keyless)]
    at = call.query_origin + keyless
    chunk = tokens_per_chunk(form, call)
    later = q[:, :, keyless:], k[:, :, lead:], v[:, :, lead:]
    if is_symbolic(call.queries, call.keys):
        here = torch.arange(later[0].shape[2], device=call.device) + at
        done, state = _run(call, _all_chunks, *later, state, here, call, form, chunk)
        return torch.cat([*out, done], dim=2), state
    parts = (split(x, chunk) for x in later)
    for q_part, k_part, v_part in zip(*parts):
        here = torch.arange(q_part.shape[2], device=call.device) + at
        done, state = _run(call, _chunk, q_part, k_part, v_part, state, here, call, form)
        out.append(done)
        at += q_part.shape[2]
    return torch.cat(out, dim=2), state


def _attend_all(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear) -> tuple[Tensor, Tensor]:
    """Attention without causality: every query uses the state after all keys."""
    sums = state_of(k, v, call, form)
    return read(q, sums, call, form), sums


def state_of(k: Tensor, v: Tensor, call: Call, form: Linear) -> Tensor:
    """Σ ψ(k) [v, 1]ᵀ over the keys of the call: (B, Hkv or H, F, Dv + 1)."""
    call, k, v, _ = prepare(call, k, v, None, form)
    return _absorb(k, v, call, form, None, call.key_origin)


def read(q: Tensor, sums: Tensor, call: Call, form: Linear) -> Tensor:
    """The output (B, H, Nq, Dv) of queries that all see the keys in the state ``sums``."""
    call = replace(call, kv_heads=sums.shape[1])
    out = [q.new_zeros(call.batch, call.heads, 0, call.value_dim, dtype=call.dtype)]
    at = call.query_origin
    for q_part in split(q, tokens_per_chunk(form, call)):
        here = torch.arange(q_part.shape[2], device=call.device) + at
        out.append(_run(call, _read, q_part, sums, here, call, form))
        at += q_part.shape[2]
    return torch.cat(out, dim=2)


def prepare(
    call: Call, k: Tensor, v: Tensor, sums: Tensor | None, form: Linear
) -> tuple[Call, Tensor, Tensor, Tensor | None]:
    """Set masked keys to 0, and expand k, v and sums to H heads if heads of a group differ.

    Heads of a group differ if the mask, the given state or the features have H heads. Masked keys
    are set to 0 because a NaN in them would spread to features and gradients.
    """
    per_head = sums is not None and sums.shape[1] != call.kv_heads
    if per_head or form.per_query_head or (call.mask is not None and call.mask.shape[1] > 1):
        if sums is not None and not per_head:
            sums = sums.repeat_interleave(call.group, dim=1)
        call, (k, v) = call.with_repeated_keys(k, v)
    if call.mask is not None:
        k = k.masked_fill(~call.mask[:, :, 0, :, None], 0.0)
    return call, k, v, sums


def offsets(call: Call) -> tuple[int, int]:
    """Return (keyless, lead) for causal attention.

    The first ``keyless`` queries see no key. The first ``lead`` keys precede the other queries.
    """
    keyless = min(call.queries, max(0, call.key_origin - call.query_origin))
    return keyless, call.keys - (call.queries - keyless)


def split(x: Tensor, length: int) -> tuple[Tensor, ...]:
    """Split x (B, H, N, …) into parts with ``length`` tokens.

    An empty x is one part, because the compiler of torch 2.11 cannot trace torch's split of it. So
    is one of symbolic length.
    """
    return (x,) if is_symbolic(x.shape[2]) or not x.shape[2] else x.split(length, dim=2)


def _zero_rows(v: Tensor, call: Call, rows: int) -> Tensor:
    return v.new_zeros(call.batch, call.heads, rows, call.value_dim, dtype=call.dtype)


def _values(v: Tensor, at: Tensor, call: Call) -> Tensor:
    """Return the values and a column of ones, both 0 for masked keys: [B, Hkv, c, Dv + 1].

    Masked keys then add 0 to the numerator and the denominator.
    """
    values = torch.nn.functional.pad(v.to(call.dtype), (0, 1), value=1.0)
    if call.mask is None:
        return values
    seen = call.mask[:, :, 0, at - call.key_origin]
    return values.masked_fill(~seen[..., None], 0.0)


def _run(call: Call, step: Any, *inputs: Any) -> Any:
    # torch.compile (2.13) cannot trace a checkpoint with dynamic shapes. It chooses by itself what
    # a backward pass recomputes.
    if call.needs_grad and not torch.compiler.is_compiling():
        # Features draw no random numbers: those of queries and keys would not match.
        return checkpoint(step, *inputs, use_reentrant=False, preserve_rng_state=False)
    return step(*inputs)


def _absorb(k: Tensor, v: Tensor, call: Call, form: Linear, sums: Tensor | None, at: int) -> Tensor:
    """Return ``sums`` plus the sums over these keys. The first key is at position ``at``."""
    shape = (call.batch, call.kv_heads, form.size(call.head_dim), call.value_dim + 1)
    state = v.new_zeros(shape, dtype=call.dtype) if sums is None else sums
    chunk = tokens_per_chunk(form, call)
    for k_part, v_part in zip(split(k, chunk), split(v, chunk)):
        here = torch.arange(k_part.shape[2], device=call.device) + at
        state = _run(call, _add, k_part, v_part, state, here, call, form)
        at += k_part.shape[2]
    return state


def _add(k: Tensor, v: Tensor, sums: Tensor, at: Tensor, call: Call, form: Linear) -> Tensor:
    features = form.features(k.to(call.dtype), at)  # [B, Hkv, c, F]
    return sums + features.transpose(-1, -2) @ _values(v, at, call)


def _query_features(q: Tensor, at: Tensor, call: Call, form: Linear) -> Tensor:
    features = features_at(form.of_queries, call.scale * q.to(call.dtype), at)  # [B, H, c, F]
    return features.unflatten(1, (call.kv_heads, -1)).flatten(2, 3)  # [B, Hkv, G·c, F]


def _divide(sums: Tensor, call: Call) -> Tensor:
    """Divide sums [B, Hkv, G·c, Dv + 1] by their last column, or by 1 if it is 0: [B, H, c, Dv]."""
    denominator = sums[..., -1:]
    out = sums[..., :-1] / denominator.masked_fill(denominator == 0, 1.0)
    return out.unflatten(2, (call.group, -1)).flatten(1, 2)


def _read(q: Tensor, sums: Tensor, at: Tensor, call: Call, form: Linear) -> Tensor:
    return _divide(_query_features(q, at, call, form) @ sums, call)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, at: Tensor, call: Call, form: Linear
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, c, Dv] of a chunk, and the state after the chunk."""
    psi_q = _query_features(q, at, call, form)  # [B, Hkv, G·c, F]
    psi_k = form.features(k.to(call.dtype), at)  # [B, Hkv, c, F]
    values = _values(v, at, call)
    inner = psi_q @ psi_k.transpose(-1, -2)  # [B, Hkv, G·c, c]
    later = at > at[:, None]
    inner = inner.masked_fill(later.repeat(call.group, 1), 0.0)
    out = _divide(inner @ values + psi_q @ sums, call)
    return out, sums + psi_k.transpose(-1, -2) @ values


def _all_chunks(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, at: Tensor, call: Call, form: Linear, chunk: int
) -> tuple[Tensor, Tensor]:
    """`_chunk` for all chunks at once: the output [B, H, N, Dv], and the state after all."""
    length = q.shape[2]
    # One more than needed: a number of chunks that may be 1 would need a graph of its own.
    count = (length + 2 * chunk - 1) // chunk
    # Padding and slices would compare the length with count · chunk.
    tokens = torch.arange(length, device=call.device)

    def chunked(x: Tensor) -> Tensor:
        """Tokens (…, N, F) as (…, chunks, c, F), padded with 0."""
        padded = x.new_zeros(*x.shape[:2], count * chunk, x.shape[3]).index_copy(2, tokens, x)
        return padded.unflatten(2, (count, chunk))

    psi_q = chunked(form.of_queries(call.scale * q.to(call.dtype), at))
    psi_q = psi_q.unflatten(1, (call.kv_heads, -1))  # [B, Hkv, G, chunks, c, F]
    psi_k = chunked(form.features(k.to(call.dtype), at))  # [B, Hkv, chunks, c, F]
    values = chunked(_values(v, at, call))
    states = torch.cat([sums[:, :, None], psi_k.mT @ values], dim=2).cumsum(2)
    inner = (psi_q @ psi_k.mT[:, :, None]).tril()  # [B, Hkv, G, chunks, c, c]
    out = inner @ values[:, :, None] + psi_q @ states[:, :, None, :-1]
    denominator = out[..., -1:]
    out = out[..., :-1] / denominator.masked_fill(denominator == 0, 1.0)
    return out.flatten(3, 4).flatten(1, 2).index_select(2, tokens), states[:, :, -1]


def _attend_segments(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear) -> Tensor:
    """Attention within segments, causal or not: (B, H, Nq, Dv)."""
    q, k, v, call, tokens = in_one_sequence(q, k, v, call)
    call, k, v, _ = prepare(call, k, v, None, form)
    values = tokens.sort(_values(v, call.key_positions, call))
    at = tokens.sorted_positions()
    q, k = tokens.sort(q), tokens.sort(k)
    if call.right is None:  # two scans: the sum of their gradients is rounded to 16 bits once
        q, k = q.to(call.dtype), k.to(call.dtype)
    chunk = tokens_per_chunk(form, call)
    parts = [
        *zip(
            range(0, call.keys, chunk), split(q, chunk), split(k, chunk),
            split(values, chunk), at.split(chunk, dim=-1), tokens.bounds.split(chunk, dim=-1),
        )
    ]  # fmt: skip
    empty = v.new_zeros(
        call.batch, call.kv_heads, form.size(call.head_dim), call.value_dim + 1, dtype=call.dtype
    )
    state, sums = empty, []
    for part in parts:
        done, state = _run(call, _segment_chunk, *part, state, call, form, False)
        sums.append(done)
    state = empty
    for n in reversed(range(len(parts) if call.right is None else 0)):
        done, state = _run(call, _segment_chunk, *parts[n], state, call, form, True)
        sums[n] = sums[n] + done
    out = [_zero_rows(v, call, 0), *(_divide(x, call) for x in sums)]
    return tokens.queries(torch.cat(out, dim=2))


def _segment_chunk(
    start: int, q: Tensor, k: Tensor, values: Tensor, at: Tensor, bounds: Tensor, sums: Tensor,
    call: Call, form: Linear, backwards: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the sums [B, Hkv, G·c, Dv + 1] of the queries of a chunk, and the state after it.

    The state ``sums`` is of the earlier keys of the segment that reaches into the chunk, or, if
    ``backwards``, of the later ones. The keys of the chunk are added if not ``backwards``.
    """
    length = q.shape[2]
    first, last = (bounds - start).unbind(1)  # [B, c] from the start of the chunk
    from_before, into_next = first < 0, last > length
    reads, enters = (into_next, from_before) if backwards else (from_before, into_next)
    psi_q = _query_features(q, at, call, form)  # [B, Hkv, G·c, F]
    psi_k = features_at(form.features, k.to(call.dtype), at)  # [B, Hkv, c, F]
    reads_state = reads.repeat(1, call.group)[:, None, :, None]
    out = (psi_q @ sums).where(reads_state, 0.0)
    if not backwards:
        local = torch.arange(length, device=call.device)
        stop = last if call.right is None else last.minimum(local + 1)
        seen = (local >= first[..., None]) & (local < stop[..., None])  # [B, c, c]
        inner = psi_q @ psi_k.transpose(-1, -2)  # [B, Hkv, G·c, c]
        out = out + inner.where(seen.repeat(1, call.group, 1)[:, None], 0.0) @ values
    # The old state counts on if its segment reaches from one end of the chunk to the other.
    crosses = (from_before & into_next)[:, 0, None, None, None]
    enters = enters[:, None, :, None]
    added = psi_k.where(enters, 0.0).transpose(-1, -2) @ values.where(enters, 0.0)
    return out, sums.where(crosses, 0.0) + added


BACKEND = Backend(
    "linear", ("linear",), unsupported, run, scan, walks_segments=True, splits_segments=True
)
