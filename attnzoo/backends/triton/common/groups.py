"""The groups of operands and constants of kernels, and those that a kernel gives its helpers.

A group is a NamedTuple, whose fields are read by name in kernels too. A tensor that a call does not
have is None, and what it would add is not compiled. Beside these groups, kernels take `Vectors` as
the operators do.

Integers that change from call to call, such as lengths and strides, are not in the groups that
kernels take: Triton would compile a kernel anew for some values. In kernels, a helper must not
return a group with None in it, because Triton 3.6 does not compile that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from triton.language import constexpr

# Arguments of kernels: lengths, strides and numbers of parts change from call to call, and must not
# trigger a recompilation.
INTEGERS = (
    "q_b q_h q_n k_b k_h k_n v_b v_h v_n o_b o_h o_n do_b do_h do_n dq_b dq_h dq_n dk_b dk_h dk_n "
    "dv_b dv_h dv_n dbias_b dbias_h dbias_m mask_b mask_h mask_m mask_n heads group queries keys "
    "left right splits parts batches sharing keep blocks first last span width"
).split()

T = TypeVar("T")


def constants(group: Callable[..., T], **values: Any) -> T:
    """Return a group of constants, for whose values a kernel is compiled.

    Functions and None stay as they are: what a function computes is then part of the kernel's key.
    """
    return group(**{n: x if x is None or callable(x) else constexpr(x) for n, x in values.items()})


def mapped(function: Callable[..., Any], value: Any, *path: int) -> Any:
    """Return ``value`` with function(x, path) for each x in it that is not a group."""
    if isinstance(value, tuple):
        made: Callable[[list[Any]], Any] = getattr(value, "_make", tuple)
        return made([mapped(function, x, *path, n) for n, x in enumerate(value)])
    return function(value, path)


# ---- arguments of kernels -----------------------------------------------------------------------


class ScoreTerms(NamedTuple):
    """The factors and terms of scores and weights beside `Vectors`; tensors are contiguous fp32."""

    scale: float  # factor of q·k, or with a softcap the softcap, factor of tanh(inner · q·k)
    inner: float | None = None  # scale / softcap
    slopes: Tensor | None = None  # [B, H, Nq], of ALiBi
    table: Tensor | None = None  # [H, 2·radius + 1], a bias by relative position
    radius: Any = None  # a constant, to compute with: in an assigned tuple it is a scalar
    key_bias: Tensor | None = None  # [B, H, Nk]
    decay: Tensor | None = None  # [B, H], of DISTANCE
    factor: Tensor | None = None  # [B, H, Nq], of the weights
    tau: Tensor | None = None  # [B, H, Nq], in the unit: a solved τ, or a softmax's saved stat
    peak: Tensor | None = None  # [B, H, Nq]: what a solved τ is relative to
    cut: Tensor | None = None  # [B, H, Nq]: no selected score is below, in SCORE_UNIT
    last: Tensor | None = None  # int32 [B, H, Nq]: the last key with the score ``cut``
    seed: Tensor | None = None  # int64 (), of dropout; see `common.dropout`
    dropout_p: float | None = None
    keep_scale: float | None = None  # 1 / (1 − p)


class Visible(NamedTuple):
    """Who sees whom, beside causality and window."""

    mask: Tensor | None  # uint8 (0: hidden) or floating point, [B|1, H|1, Nq|1, Nk]
    q_segments: Tensor | None  # int64 [B, Nq]
    k_segments: Tensor | None  # int64 [B, Nk]
    ranges: Tensor | None = None  # int32 [B, tiles, 2]; see `flash.segments`
    table: Tensor | None = None  # int32 [B, blocks], of paged keys; see `Paged`
    used: Tensor | None = None  # int32 [B]: so many last keys are in the pages


class Maps(NamedTuple):
    """Lists of blocks, and which are in them: those of `Solved`, or of `flash.query_lists`."""

    blocks: Tensor | None = None
    counts: Tensor | None = None
    live: Tensor | None = None


class Saved(NamedTuple):
    """The vectors [B, H, Nq] that the forward writes.

    With SUM, stat is Z. With ONLINE and no weight_sum, stat is log2 Σ 2^s. With ONLINE and
    weight_sum, stat is the largest score m and weight_sum is Σ 2^{s−m}. With SHIFTED, stat is M and
    weight_sum is Z. Z and log2 Σ 2^s include the sink; m, Σ 2^{s−m} and lse do not.
    Of a query without keys stat is 0 with ONLINE, weight_sum and Z are 1, and lse is −∞.
    """

    stat: Tensor | None = None
    weight_sum: Tensor | None = None
    lse: Tensor | None = None


class Partials(NamedTuple):
    """Partial results of splits of the keys, fp32 [B, groups, splits, rows]; see `merge`.

    A group is a key/value head in `decode`, a query head in `flash`.
    """

    o: Tensor | None = None  # [B, groups, splits, rows, DV]
    m: Tensor | None = None
    z: Tensor | None = None
    t: Tensor | None = None  # of statistics, see `flash.statistics`


class Normalizers(NamedTuple):
    """The vectors [B, H, Nq] with which the backward computes dS; see `flash.backward_q`."""

    z: Tensor | None = None  # Z of the forward
    per_z: Tensor | None = None  # 1/Z, written by `flash_dq`
    delta: Tensor | None = None  # gain · δ/Z, or δ/Z with PLAIN_DELTA; written by `flash_dq`
    dlse: Tensor | None = None


class Gradients(NamedTuple):
    """The gradients of vectors that a backward kernel writes, each shaped as its vector."""

    gain: Tensor | None = None
    offset: Tensor | None = None
    shape: Tensor | None = None
    sink: Tensor | None = None
    slopes: Tensor | None = None
    table: Tensor | None = None  # [B, H, Nq, 2·radius + 1], initially 0; the caller takes the sum
    factor: Tensor | None = None
    decay: Tensor | None = None  # [B, H, Nq], of which the caller takes the sum
    key_bias: Tensor | None = None  # [2, B, H, Nk], initially 0; the caller takes the sum


class RuleConstants(NamedTuple):
    """How weights follow from scores, see `Rule`. Constants, of which a kernel reads some."""

    UNIT: float  # factor of the scores that the activation expects
    SCORE_UNIT: float | None = None  # factor of the scores that are selected from, else UNIT
    ACT: Any = None  # function (x, shape) -> φ, φ', and with NORMALIZER also μ, μ'
    VANISHES: bool | None = None  # φ(−∞) = 0
    NORMALIZER: bool | None = None  # the weights are divided by a sum of μ ≠ φ
    SHIFTED: bool | None = None  # φ and μ are relative to M
    PEAKED: bool | None = None  # φ and dS are relative to their running maxima
    ONLINE: bool | None = None  # softmax: τ is the running maximum
    SUM: bool | None = None  # the weights are divided by their sum
    DISTANCE: Any = None  # function (t, decay) -> gain and bias of the scores by distance
    LATE: str | None = None  # see `fold.factor_out`
    SHAPE_SLOPE: Any = None  # function (x, shape) -> ∂φ/∂shape
    DISTANCE_SLOPE: Any = None  # function (t, decay) -> the slopes of DISTANCE in decay
    MEAN: str | None = None  # how δ is computed, see `flash.backward_q`
    PLAIN_DELTA: bool | None = None
    PLAIN: bool | None = None  # scores are multiples of the products q·k
    HIDES: bool | None = None  # keys that causality and window allow may be hidden
    ALPHA: float | None = None  # of a threshold; None: `Vectors.shape` holds it


class Tile(NamedTuple):
    """Sizes of matrices and blocks. Constants, of which a kernel reads some."""

    D: int | None = None
    BLOCK_D: int | None = None  # D, padded
    BLOCK_M: int | None = None  # queries per block
    BLOCK_N: int | None = None  # keys per block
    DV: int | None = None
    BLOCK_DV: int | None = None
    PART: int | None = None  # columns per product; see `tile.times`
    SPLIT: bool | None = None  # full blocks have a loop of their own, without masks
    MAP_M: int | None = None  # tiles of a block map
    MAP_N: int | None = None
    TRANSPOSED: bool | None = None  # see `flash.backward_kv`
    ALIGN: int | None = None  # the unit of strides, in elements
    MASK_ALIGN: int | None = None  # the unit of the mask's strides, in entries
    PRECISION: str | None = None  # of products of fp32 matrices
    PAGE: int | None = None  # keys of a page


# ---- in kernels ---------------------------------------------------------------------------------


class MatrixPages(NamedTuple):
    """Where the rows of a `Matrix` are whose last rows are in pages."""

    table: Any  # pointer to the pages of the batch entry
    missing: Any  # number of first rows that are in no page
    stride: Any  # between pages
    size: Any  # rows of a page


class Matrix(NamedTuple):
    """A matrix (count, DIM) in memory: the rows of one batch and head."""

    base: Any  # pointer to the first row
    stride: Any  # between rows
    count: Any
    descriptor: Any  # TMA descriptor of the whole tensor, or None
    batch: Any
    head: Any
    pages: Any = None  # `MatrixPages`, or None if the rows follow one another


class Side(NamedTuple):
    """A block of rows of a matrix, as one side of a product."""

    tile: Any  # the rows, loaded
    matrix: Any
    first: Any  # index of the first row
    local: Any  # 0 … BLOCK − 1


class KeySides(NamedTuple):
    """Keys and values, whose blocks a loop loads."""

    k: Any  # `Matrix`, or None if the products q kᵀ are in memory
    v: Any
    d: Any  # columns of k [BLOCK_D], or None
    dv: Any  # columns of v [BLOCK_DV]


class Size(NamedTuple):
    queries: Any
    keys: Any
    left: Any  # number of keys before the query's own position that it sees, or None for all
    right: Any


class QueryBlock(NamedTuple):
    """The queries of a program."""

    batch: Any
    head: Any
    at: Any  # offset of the head in vectors [B, H, Nq]
    first: Any
    local: Any  # [BM]: 0 … BM − 1


class QueryVectors(NamedTuple):
    """`Vectors` and `ScoreTerms` of the queries of a tile, loaded, and 0 where there are none.

    All are [BM, 1], or [1, BM] in a transposed tile.
    """

    gain: Any  # 1 where there is none
    factor: Any  # gain · scale · UNIT, of the products; `ScoreTerms.factor` is of the weights
    tau: Any  # subtracted from the scores by φ, in their unit
    shape: Any
    slope: Any  # of ALiBi, · UNIT
    offset: Any
    peak: Any
    threshold: Any  # τ relative to the peak
    hash: Any  # of the query, for dropout
    cut: Any
    last: Any


class Head(NamedTuple):
    """Where the data of a batch and head begin, and what the scores of the head share."""

    mask: Any  # offset in the mask
    k_segments: Any  # offset in `Visible.k_segments`
    key_bias: Any  # offset in `ScoreTerms.key_bias`
    table: Any  # offset in `ScoreTerms.table`
    decay: Any
    segment: Any  # segments of the queries, [BM, 1], or [1, BM] in a transposed tile


class MaskStrides(NamedTuple):
    """Strides in units of ``align`` entries. None: all heads or queries share the entries."""

    batch: Any
    head: Any
    query: Any
    key: Any  # in entries; None: 1
    align: Any


class Scoring(NamedTuple):
    """What turns products q·k of a tile into scores."""

    loaded: Any  # `QueryVectors`
    head: Any
    vectors: Any
    terms: Any  # `ScoreTerms`
    visible: Any
    strides: Any  # `MaskStrides`
    size: Any
