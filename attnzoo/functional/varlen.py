"""varlen_attention(): attention within each of several sequences that lie one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.selection import check_backend
from attnzoo.core.arguments import ARGUMENTS
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import check_bool, is_recorded
from attnzoo.core.varlen_arguments import (
    Packed,
    TokenParams,
    check_no_splits,
    check_packed,
    wants_lse,
    with_batch,
    with_window_size,
)
from attnzoo.functional import packed
from attnzoo.functional.attention import attention
from attnzoo.functional.max_logits import max_logits, max_logits_of_segments
from attnzoo.functional.packed import runs_of_sequences
from attnzoo.functional.padded import (
    as_one_row,
    first_able,
    padded_attention,
    reads_pages,
    sequences,
    with_used_keys,
)
from attnzoo.functional.prepare import prepare, why_unsupported
from attnzoo.functional.results import Results
from attnzoo.functional.use_backend import named_backend

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int | Tensor,
    max_k: int | Tensor,
    variant: str = "softmax",
    *,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    return_lse: Literal[False] = False,
    return_aux: None = None,
    return_max_logits: Literal[False] = False,
    **params: Tensor | float | None,
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int | Tensor,
    max_k: int | Tensor,
    variant: str = "softmax",
    *,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    return_lse: Literal[True],
    return_aux: None = None,
    return_max_logits: Literal[False] = False,
    **params: Tensor | float | None,
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int | Tensor,
    max_k: int | Tensor,
    variant: str = "softmax",
    *,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    return_max_logits: Literal[False] = False,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int | Tensor,
    max_k: int | Tensor,
    variant: str = "softmax",
    *,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    return_max_logits: Literal[True],
    **params: Tensor | float | None,
) -> tuple[Tensor, ...]: ...
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int | Tensor,
    max_k: int | Tensor,
    variant: str = "softmax",
    *,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    return_max_logits: bool = False,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention within each of several packed sequences: out_i = Σ_j w_ij v_j.

    Sequence s has the queries ``cu_seq_q[s]`` … ``cu_seq_q[s + 1] − 1`` and the keys
    ``cu_seq_k[s]`` … ``cu_seq_k[s + 1] − 1``, or the first ``seqused_k[s]`` of these. With a
    ``block_table``, its keys are in the pages ``block_table[s]`` of a cache. The results are those
    of `attention` on each sequence: n_i counts its keys, and its positions start anew. The first
    seven arguments, ``window_size``, ``scale``, ``enable_gqa``, ``seqused_k``, ``block_table`` and
    ``return_aux`` are those of `torch.nn.attention.varlen.varlen_attn`.

    Args:
        query: Queries (Tq, H, D) of all sequences, in fp16, bf16, fp32 or fp64.
        key: Keys (Tk, Hkv, D), of the same dtype and on the same device. With ``block_table``,
            pages of keys (num_pages, page_size, Hkv, D).
        value: Values (Tk, Hkv, Dv), likewise. With ``block_table``, pages of values
            (num_pages, page_size, Hkv, Dv).
        cu_seq_q: Int32 or int64 (S + 1,): 0, then the sums of the lengths of the first 1, 2, …, S
            sequences, so that the last entry is Tq. A length may be 0.
        cu_seq_k: The same for the keys; the last entry is Tk. None with ``block_table``.
        max_q: The largest number of queries in a sequence, or more; an int or a tensor () of ints.
        max_k: The largest number of keys in a sequence, or more; likewise. With ``seqused_k``, of
            the keys that take part.
        variant: A name from `list_variants`.
        is_causal: A query sees the keys up to its own position. The last query of a sequence has
            the position of its last key.
        window: As for `attention`, from a query's position in its sequence.
        window_size: A pair (left, right), as in torch: how many keys a query sees before and after
            its own position, with -1 for no limit. (-1, 0) is the same as ``is_causal``, and
            (W, 0) as ``is_causal`` with ``window`` W + 1. Excludes ``window``.
        scale: Factor of q·k. None is D^-½.
        enable_gqa: Allow H to be a multiple of Hkv.
        softcap: As for `attention`.
        alibi: Slopes (H,), as for `attention`.
        relative_bias: A table (H, 2R + 1), as for `attention`.
        dropout_p: As for `attention`.
        seqused_k: Int32 (S,): only the first ``seqused_k[s]`` keys of sequence s take part. Others
            are neither visible nor counted, and may be NaN. None: all keys do.
        block_table: Int32 (S, max_blocks): key t of sequence s is entry t % page_size of the page
            ``block_table[s, t // page_size]``. Entries beyond the keys that take part may have any
            value. Needs ``seqused_k``.
        backend: As for `attention`.
        return_lse: As for `attention`.
        return_aux: As in torch: ``AuxRequest(lse=True)`` is the same as ``return_lse``.
        return_max_logits: As for `attention`; the maximum is over all sequences.
        **params: Parameters of the variant, as for `attention`; a tensor with one value per query
            or per key is (H, Tq) or (H, Tk). With ``block_table``, one value per key is
            (num_pages, page_size, H).

    Returns:
        The output (Tq, H, Dv) in the dtype of ``query``. With ``return_lse`` a pair (output, lse),
        lse of shape (H, Tq) in fp32 (fp64 for fp64 inputs). A query of a sequence without keys has
        output 0, lse −inf and gradient 0. With ``return_max_logits`` the last element of the tuple
        is the maximum, (H,), in lse's dtype.

    Raises:
        ValueError: An argument has a wrong value or shape, or the call is unsupported by the
            variant or by the named backend.
        TypeError: An argument has a wrong type or dtype, or a parameter is unknown or missing.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 10, 4, 16).unbind()
        >>> ends = torch.tensor([0, 3, 10])
        >>> out = attnzoo.varlen_attention(q, k, v, ends, ends, 7, 7, "ssmax", is_causal=True)
        >>> out.shape
        torch.Size([10, 4, 16])
        >>> first = [x[None, :3].transpose(1, 2) for x in (q, k, v)]
        >>> alone = attnzoo.attention(*first, "ssmax", is_causal=True)
        >>> torch.allclose(out[:3], alone[0].transpose(0, 1), atol=1e-6)
        True

    Notes:
        Torch's ``num_splits`` must be None.

        The backend `decode` reads pages itself. For others, keys are first gathered: on a CPU those
        that take part, elsewhere ``max_k`` for each sequence. Pages have gradients, which torch
        refuses.

        On a CPU, sequences of equal lengths run as one batch, and others in one call each. Where
        the values of ``cu_seq_q``, ``cu_seq_k``, ``seqused_k`` and ``block_table`` cannot be read
        without waiting for a device (on a GPU, and under `torch.compile`), they are not checked.
        Sequences are then padded to ``max_q`` and ``max_k``, unless ``cu_seq_q`` and ``cu_seq_k``
        are the same tensor and the backend reads the bounds of the sequences itself. Tensors as
        ``max_q`` and ``max_k`` are read; a graph of `torch.compile` cannot read them, and pads to
        the number of all tokens.
    """
    aux = wants_lse(return_aux)
    return_lse = check_bool("return_lse", return_lse) or aux
    ends, longest = (cu_seq_q, cu_seq_k), (max_q, max_k)
    tensors = query, key, value
    inputs = check_packed(tensors, ends, longest, enable_gqa, seqused_k, block_table)
    backend = named_backend(backend)
    check_backend(backend)
    check_no_splits(params)
    is_causal, window = with_window_size(window_size, is_causal, window)
    for name in ARGUMENTS.intersection(params):
        raise TypeError(
            f"varlen_attention does not accept {name}; cu_seq_q and cu_seq_k give the sequences, "
            "is_causal and window the visible keys"
        )
    arguments: dict[str, Any] = dict(
        is_causal=is_causal,
        window=window,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        alibi=alibi,
        relative_bias=relative_bias,
        dropout_p=dropout_p,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    token_params = with_batch(variant, params, query, key)
    return _attend(inputs, variant, backend, arguments, token_params).returned


def _attend(
    inputs: Packed,
    variant: str,
    backend: str | None,
    arguments: dict[str, Any],
    token_params: TokenParams,
) -> Results:
    """The output (Tq, H, Dv), and lse (H, Tq) and the maxima (H,) if the call asks for them."""
    options, lengths = arguments | token_params.values, inputs.lengths
    if not inputs.attends:
        # One query per row: a variant may limit the length of a sequence.
        rows, q = inputs.query.shape[0], inputs.query[:, :, None]
        k, v = (x[:0].flatten(0, -3).transpose(0, 1)[None] for x in (inputs.key, inputs.value))
        k, v = (x.expand(rows, -1, -1, -1) for x in (k, v))
        for name in token_params.of_queries:
            options[name] = options[name][0].T[..., None]
        for name in token_params.of_keys:
            options[name] = options[name][..., :0].flatten(2).expand(rows, -1, -1)
        result = attention(q, k, v, variant, backend=backend, **options)
        out, lse, largest = Results.of(result, options)
        return Results(out[:, :, 0], None if lse is None else lse[..., 0].T, largest)
    if lengths is not None and not is_recorded() and not reads_pages(inputs, backend):
        if inputs.used is not None:
            inputs, token_params = with_used_keys(inputs, token_params)
            options |= token_params.values
        q, k, v = as_one_row(inputs)
        ready = prepare(q, k, v, variant, options)
        runs = runs_of_sequences(*lengths)
        with in_full_precision(q.device):
            out, lse = packed.attend_segments(ready, runs, backend)
        of_runs = ready.call.return_max_logits
        largest = max_logits_of_segments(ready, runs, backend) if of_runs else None
    else:
        walked = None
        if inputs.ends[0] is inputs.ends[1] and inputs.used is None:
            walked = _walked(inputs, variant, backend, options)
        if walked is None:
            return padded_attention(inputs, variant, backend, arguments, token_params)
        out, lse, largest = walked
    return Results(out[0].transpose(0, 1), None if lse is None else lse[0], largest)


def _walked(
    inputs: Packed, variant: str, backend: str | None, arguments: dict[str, Any]
) -> Results | None:
    """Run the sequences as segments of one row; None if no backend walks them in this call."""
    q, k, v = as_one_row(inputs)
    ids, longest = sequences(inputs.ends[0], q.shape[2])[None], min(inputs.longest)
    ready = prepare(q, k, v, variant, arguments | {"segment_ids": ids})
    # A variant may limit the length of a sequence, but not the number of packed tokens.
    sequence = replace(ready.call, queries=longest, keys=longest)
    if why_unsupported(ready.variant, sequence, ready.params) is not None:
        return None
    call = replace(ready.call, longest=longest)
    with in_full_precision(call.device):
        ready = ready._replace(call=call)
        first = first_able(ready, backend)
        if first is None or not BACKENDS[first.backend].walks_segments:
            return None
        runner = BACKENDS[first.backend]
        out, lse = runner.run(ready.q, ready.k, ready.v, call, first.form)
    largest = max_logits(ready.q, ready.k, call, runner) if call.return_max_logits else None
    return Results(out.to(call.input_dtype), lse, largest)
