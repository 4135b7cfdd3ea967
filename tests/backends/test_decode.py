"""The decode backend, which splits the keys, agrees with the fp64 definition of all variants.

The kernels run in Triton's interpreter with four processors and blocks of 32 keys. The fixture
`many_splits` allows splits of 32 keys, so that a few hundred keys give up to eight splits, and 33
keys one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import launch, prepared
from attnzoo.backends.triton.common.kernel_operands import NOT_PAGED
from attnzoo.backends.triton.common.launch import Launch
from attnzoo.backends.triton.decode import launch as launch_decode
from attnzoo.backends.triton.decode import operators as decode_ops
from attnzoo.core import activations
from helpers.agreement import Inputs, make
from helpers.agreement import disagreements as disagreements_of
from helpers.cases import NO_LSE, VARIANTS, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS, levels_of
from helpers.covering import label
from helpers.kernel_paths import Level, quick_rows, quick_variants, variant_rows
from helpers.operators import opcheck

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

DECODE = [name for name, reasons in VARIANT_BACKENDS.items() if reasons["decode"] is RUNS]
every_variant = pytest.mark.parametrize(
    "variant", quick_variants(v for v in DECODE if v in VARIANTS)
)

FACTORS = {
    "shape": ((1, 1), (1, 200), (3, 150), (5, 33), (10, 7)),
    "batch": (1, 2),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ("none", "bool", "keys", "float", "float keys"),
    "mask_gradient": (False,),
    "span": ("full", "causal", "window", "pair"),
    "heads": ("2 heads", "gqa", "3 of 1"),
    "values": ("same",),
    "dims": ((16, 16), (40, 40), (64, 64), (40, 24)),
    "bias": (None, "alibi", "table"),
    "segments": (False, True),
    "dropout": (False,),
    "lse": (False, True),
    "layout": ("contiguous", "bnhd", "sliced"),
}


@pytest.fixture(autouse=True)
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_decode, "LEAST_KEYS", 32)


def factors(variant: str) -> tuple[tuple[str, tuple], ...]:
    return tuple(levels_of(variant, FACTORS).items())


# If several pairs (variant, parameters) take the same path through the kernel, one of them is
# tested over all FACTORS, and the others run only these cases.
THIN = [
    {name: values[0] for name, values in FACTORS.items()}
    | {"shape": (3, 150), "span": "causal", "mask": "bool", "heads": "gqa", "dtype": dtype}
    for dtype in (torch.float32, torch.bfloat16)
]


def all_allowed(case: dict[str, Any]) -> bool:
    return True


def levels() -> list[Level]:
    """All pairs of a variant and its parameters that decode supports."""
    return [Level(v, params) for v in DECODE for params in dict(factors(v))["params"]]


def cases() -> Iterator[Any]:
    """Yield quick cases for each kernel path (see `kernel_paths`) and slow cases per variant."""
    for seed, (variant, case) in enumerate(quick_rows(FACTORS, levels(), all_allowed, THIN)):
        yield pytest.param(variant, case, seed, id=f"quick-{variant}-{label(case)}")
    for variant, seed, case in variant_rows(DECODE, factors, all_allowed):
        name = f"{variant}-{label(case)}"
        yield pytest.param(variant, case, seed, id=name, marks=pytest.mark.slow)


def disagreements(variant: str, inputs: Inputs) -> list[str]:
    return disagreements_of(variant, "decode", inputs, gradients=False)


@pytest.mark.parametrize(("variant", "case", "seed"), list(cases()))
def test_agrees_with_the_definition(variant: str, case: dict[str, Any], seed: int) -> None:
    assert disagreements(variant, make(variant, case, seed=10 * seed)) == []


def setting(variant: str, **others: Any) -> dict[str, Any]:
    """A case of 2 queries and 100 keys, with lse if supported.

    ``others`` are settings that override those of the case.
    """
    case = {name: levels[0] for name, levels in factors(variant)}
    return {**case, "shape": (2, 100), "lse": variant not in NO_LSE, **others}


# ---- large scores, queries without keys -----------------------------------------------------


@pytest.mark.parametrize(
    ("score", "dtype"),
    [
        (-200.0, torch.float32),
        (80.0, torch.float16),
        pytest.param(-200.0, torch.float16, marks=pytest.mark.slow),
        pytest.param(80.0, torch.float32, marks=pytest.mark.slow),
    ],
)
@every_variant
def test_scores_far_from_zero_agree(variant: str, score: float, dtype: torch.dtype) -> None:
    inputs = make(variant, setting(variant, dtype=dtype, span="causal"))
    inputs.leaves["q"][..., 0], inputs.leaves["k"][..., 0] = 4.0, score
    inputs.leaves["v"] /= 64  # fp16 can then hold the output of weights such as (2·80 − 1)²
    assert disagreements(variant, inputs) == []


def test_a_polynomial_of_large_scores_does_not_overflow_fp16() -> None:
    inputs = make("taylor", setting("taylor", dtype=torch.float16))
    inputs.leaves["q"][..., 0], inputs.leaves["k"][..., 0] = 4.0, 400.0
    assert disagreements("taylor", inputs) == []


@every_variant
def test_wide_heads_agree_with_the_definition(variant: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make(variant, setting(variant, shape=(1, 40), dtype=dtype, dims=(256, 136)))
        assert disagreements(variant, inputs) == []


@every_variant
def test_queries_without_keys_give_zeros_and_splits_without_keys_are_ignored(variant: str) -> None:
    """The mask hides all keys of some splits, and all keys of the second batch entry."""
    q, k, v = rand(2, 4, 2, 16).float(), *(rand(2, 2, 150, 16, seed=i).float() for i in (1, 2))
    mask = torch.zeros(2, 1, 1, 150, dtype=torch.bool)
    mask[0, ..., 70:75] = True
    lse = {"return_lse": True} if variant not in NO_LSE else {}
    options = {"attn_mask": mask, "enable_gqa": True, **lse, **params_of(variant)}
    results = attnzoo.attention(q, k, v, variant, backend="decode", **options)
    out = results[0] if lse else results
    visible: Any = (k[:1, :, 70:75], v[:1, :, 70:75])
    shown: dict[str, Any] = {}
    if attnzoo.get_variant(variant).by_position:  # without the hidden keys, positions would change
        visible, shown = (k[:1], v[:1]), {"attn_mask": mask[:1], "backend": "eager"}
    expected = attnzoo.attention(
        q[:1], *visible, variant, enable_gqa=True, **shown, **params_of(variant)
    )
    assert torch.allclose(out[:1], expected, atol=1e-5)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    if lse:
        assert bool((results[1][1] == float("-inf")).all())


@every_variant
def test_empty_tensors_give_zeros(variant: str) -> None:
    for batch, queries, keys in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (rand(batch, 2, n, 16).float() for n in (queries, keys, keys))
        out = attnzoo.attention(q, k, v, variant, backend="decode", **params_of(variant))
        assert torch.equal(out, torch.zeros(batch, 2, queries, 16))


# Triton's interpreter computes maxima with numpy, which warns if all values are NaN.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("keys", [20, 100])
@every_variant
def test_nan_in_a_query_only_affects_its_own_output(variant: str, keys: int) -> None:
    q, k, v = (rand(1, 2, n, 16, seed=n).float() for n in (3, keys, keys + 1))
    q[0, 1, 2, 5] = float("nan")
    out = attnzoo.attention(q, k, v[:, :, 1:], variant, backend="decode", **params_of(variant))
    assert bool(out[0, 1, 2].isnan().all())
    assert bool(out[0, 0].isfinite().all())
    assert bool(out[0, 1, :2].isfinite().all())


def test_keys_outside_the_window_are_not_read() -> None:
    """The first 256 keys are outside the window. NaN in these does not change the result."""
    q, k, v = (rand(1, 2, n, 16, seed=n).float() for n in (2, 300, 301))
    v = v[:, :, 1:]
    options = {"is_causal": True, "window": 20, "backend": "decode"}
    clean = attnzoo.attention(q, k, v, "sigmoid", **options)
    k[:, :, :256], v[:, :, :256] = float("nan"), float("nan")
    assert torch.equal(attnzoo.attention(q, k, v, "sigmoid", **options), clean)


# ---- splits -----------------------------------------------------------------------------------


@every_variant
def test_the_number_of_splits_does_not_change_the_result(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = rand(1, 4, 2, 16).float(), *(rand(1, 2, 300, 16, seed=i).float() for i in (1, 2))
    outs = []
    for processors in (1, 3, 1000):
        monkeypatch.setattr(launch, "processors", lambda device, n=processors: n)
        options: Any = {"is_causal": True, "enable_gqa": True, "backend": "decode"}
        options |= params_of(variant)
        outs.append(attnzoo.attention(q, k, v, variant, **options))
    accuracy = 2e-6 * max(1.0, float(outs[0].abs().max()))  # weights may be far above 1
    assert torch.allclose(outs[0], outs[1], atol=accuracy)
    assert torch.allclose(outs[0], outs[2], atol=accuracy)


def test_splits_use_all_processors_and_are_not_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()

    def splits(batch: int, keys: int, window: int | None = None) -> dict[str, int]:
        q = torch.empty(batch, 32, 1, 128, dtype=torch.bfloat16, device="meta")
        k = q.new_empty(batch, 8, keys, 128)
        left = None if window is None else window - 1
        layout = Layout(1.0, left, 0, None, None, None, None)
        return launch_decode._splits(q, k, NOT_PAGED, layout, 64, 132)

    assert splits(1, 2**18)["splits"] * 8 >= 264
    assert splits(32, 2**18)["splits"] * 256 >= 264
    assert splits(1, 100)["splits"] == 1
    for keys in (1, 100, 1024, 5000, 2**20):
        sizes = splits(1, keys)
        number, span, blocks = sizes["splits"], sizes["span"], sizes["last"] - sizes["first"]
        assert number == 1 or span * 64 >= 256
        assert number <= 256
        # Each block of keys belongs to exactly one split, and no split is empty.
        assert (number - 1) * span < blocks <= number * span
        assert sizes["last"] * 64 >= keys
    narrow = splits(1, 2**18, window=1000)
    assert (narrow["last"] - narrow["first"]) * 64 <= 1000 + 2 * 128


@pytest.mark.parametrize("variant", ["softmax", "sink", "sigmoid", "taylor", "softpick"])
@pytest.mark.parametrize(("keys", "launches"), [(1, 1), (100, 1), (511, 1), (512, 2)])
def test_one_split_needs_no_merge(
    variant: str, keys: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    ran = launches_of(monkeypatch)
    q, k, v = (rand(1, 2, n, 16, seed=n).float() for n in (1, keys, keys + 1))
    attnzoo.attention(q, k, v[:, :, 1:], variant, backend="decode", **params_of(variant))
    assert ran == ["decode", "merge_splits"][:launches]


@pytest.mark.parametrize(("keys", "launches"), [(100, 1), (512, 2)])
def test_statistics_of_one_split_need_one_launch(
    keys: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    ran = launches_of(monkeypatch)
    q, k = (rand(1, 2, n, 16, seed=n).float() for n in (1, keys))
    layout = Layout(1.0, None, 0, None, None, None, None)
    decode_ops.decode_statistics(q=q, k=k, paged=NOT_PAGED, layout=layout)
    assert ran == ["decode_products", "decode_stats"][:launches]


def launches_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each kernel that is launched."""
    ran, launch_kernel = [], prepared.run

    def record(launch: Launch) -> Any:
        ran.append(launch.kernel.__name__)
        return launch_kernel(launch)

    monkeypatch.setattr(prepared, "run", record)
    return ran


# ---- operators, compilation ----------------------------------------------------------------------

MASK = (rand(1, 2, 1, 9, seed=5) > -0.8).view(torch.uint8)
IDS = (torch.arange(9) // 4).expand(1, 9).contiguous()
VECTOR = rand(1, 2, 3, seed=6).float().abs()
ALL = Layout(0.3, 4, 2, MASK, IDS[:, -3:].contiguous(), IDS, VECTOR)
TERMS = Terms(key_bias=rand(1, 2, 9, seed=7).float())
SOFTMAX = Rule(activations.EXP, "sum")


def small() -> list[Tensor]:
    return [
        rand(1, heads, n, 8, seed=i).float()
        for i, (heads, n) in enumerate(((2, 3), (1, 9), (1, 9)))
    ]


@pytest.mark.slow
def test_opcheck() -> None:
    q, k, v = small()
    opcheck(decode_ops.decode_statistics, q=q, k=k, paged=NOT_PAGED, layout=ALL)
    products, *_ = decode_ops.decode_statistics(q=q, k=k, paged=NOT_PAGED, layout=ALL)
    for stored, vectors, terms, rule, want_lse in (
        (None, Vectors(VECTOR, VECTOR, sink=VECTOR), TERMS, SOFTMAX, True),
        (None, Vectors(None, VECTOR), Terms(factor=VECTOR), Rule(activations.SIGMOID, "none"),
         False),
        (products, Vectors(VECTOR), TERMS, SOFTMAX, False),
        (None, Vectors(VECTOR), TERMS, Rule(activations.ENTMAX15, "threshold"), False),
    ):  # fmt: skip
        opcheck(
            decode_ops.decode_forward, q=q, k=k, v=v, products=stored, paged=NOT_PAGED,
            vectors=vectors, terms=terms, layout=ALL, rule=rule, want_lse=want_lse,
        )  # fmt: skip


def test_compiles_without_graph_breaks() -> None:
    q, k, v = small()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnzoo.attention(q, k, v, "ssmax", enable_gqa=True, backend="decode")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attend(q, k, v))


def test_errors_name_a_backend_that_supports_the_call() -> None:
    q, k, v = small()
    with pytest.raises(ValueError, match=r"decode.*does not support gradients \(flash does\)"):
        attnzoo.attention(q.requires_grad_(), k, v, enable_gqa=True, backend="decode")
    for dtype, most in ((torch.float16, 64), (torch.float32, 32)):
        q, k, v = (rand(1, heads, 33, 8).to(dtype) for heads in (2, 1, 1))
        with pytest.raises(ValueError, match=f"more than {most} queries .* got 66 .flash"):
            attnzoo.attention(q, k, v, enable_gqa=True, backend="decode")


@pytest.mark.parametrize(
    "variant",
    [v if v == "sink" else pytest.param(v, marks=pytest.mark.slow) for v in DECODE],
)
def test_decoding_with_a_cache_agrees_with_the_whole_sequence(variant: str) -> None:
    """The cache gets 30 tokens, then 3, then single ones. One of two sequences is left-padded."""
    q, k, v = (rand(2, 4 if i == 0 else 2, 40, 8, seed=i).float() for i in range(3))
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., :9] = False
    expected = attnzoo.attention(
        q, k, v, variant, is_causal=True, attn_mask=mask, enable_gqa=True, **params_of(variant)
    )
    cache, outs, start = attnzoo.nn.KVCache(64), [], 0
    for stop in (30, 33, *range(34, 41)):
        tokens = (x[:, :, start:stop] for x in (q, k, v))
        options = {"attn_mask": mask[..., :stop], "enable_gqa": True, **params_of(variant)}
        backend = "decode" if start else None
        outs.append(attnzoo.nn.attend(cache, *tokens, variant, backend=backend, **options))
        start = stop
    assert torch.allclose(torch.cat(outs, dim=2), expected, atol=1e-5)
