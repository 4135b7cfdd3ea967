"""Scaled RoPE: its frequencies beside those of transformers, and attnzoo.nn.Transformer with it."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.nn import Transformer
from attnzoo.nn.rope import frequencies, parse_scaling, rotate
from helpers.cases import rand

LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
NTK: dict[str, Any] = {"rope_type": "ntk", "factor": 4.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 6,
    "beta_fast": 0.7,
    "beta_slow": 0.05,
}
SCALINGS = [pytest.param(x, id=x["rope_type"]) for x in (LINEAR, NTK, YARN)]
TOKENS = torch.randint(20, (2, 14), generator=torch.Generator().manual_seed(3))


def model(
    scaling: dict[str, Any] | None = None, variant: str = "softmax", **options: Any
) -> Transformer:
    """Return an fp64 model with large random matrices, so that attention is not uniform."""
    made = Transformer(20, 32, 4, 2, variant, rope_scaling=scaling, **options).double().eval()
    with torch.no_grad():
        for i, x in enumerate(made.parameters()):
            if x.dim() > 1:
                x.copy_(0.3 * rand(*x.shape, seed=i))
    return made.requires_grad_(False)


def scaled(scaling: dict[str, Any], head_dim: int, base: float) -> Tensor:
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    return parse_scaling(scaling, head_dim, base).frequencies(pair, head_dim, base)


@pytest.mark.parametrize(
    ("head_dim", "base", "length", "factor", "others"),
    [
        (64, 10000.0, 2048, 4.0, {}),
        (128, 500000.0, 8192, 32.0, {"beta_fast": 16.0, "beta_slow": 2.0}),
        (32, 10000.0, 256, 16.0, {}),
        (32, 10000.0, 16, 1.0, {}),  # the bound of beta_fast is below pair 0
        (16, 10.0, 4096, 2.5, {"attention_factor": 1.5}),  # all pairs turn often
    ],
)
@pytest.mark.parametrize("rope_type", ["linear", "ntk", "yarn"])
def test_frequencies_and_attention_factor_are_those_of_transformers(
    rope_type: str, head_dim: int, base: float, length: int, factor: float, others: dict[str, float]
) -> None:
    """Their type "dynamic" with factor 1 at f times the train length has the base of "ntk"."""
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    theirs = {"rope_type": rope_type, "factor": factor, "rope_theta": base}
    ours: dict[str, Any] = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        ours |= {"original_max_position_embeddings": length, **others}
        theirs |= ours
    if rope_type == "ntk":
        theirs |= {"rope_type": "dynamic", "factor": 1.0}
    from transformers import LlamaConfig

    config = LlamaConfig(
        head_dim=head_dim,
        rope_theta=base,
        rope_parameters=theirs,
        max_position_embeddings=length,
    )
    compute = utilities.ROPE_INIT_FUNCTIONS[theirs["rope_type"]]
    expected, amplitude = compute(config, torch.device("cpu"), round(factor * length))
    assert parse_scaling(ours, head_dim, base).amplitude == pytest.approx(amplitude, rel=1e-15)
    # They compute in fp32: the exponent of the base is rounded, and so are a few operations.
    rounding = 2**-24 * (2 * math.log(base * factor**2) + 8)
    actual = scaled(ours, head_dim, base)
    assert torch.allclose(actual, expected.double(), rtol=rounding, atol=0)


def test_ntk_interpolates_the_lowest_frequency_and_keeps_the_highest() -> None:
    plain = frequencies(torch.arange(16, dtype=torch.float64), 32, 1e4)
    ratio = scaled(NTK, 32, 1e4) / plain
    assert ratio[[0, 15]].tolist() == pytest.approx([1, 1 / 4], rel=1e-14)
    assert ratio.diff().max() < 0


@pytest.mark.parametrize("length", [3, 16, 256, 4096, 10**9])
def test_yarn_interpolates_by_the_number_of_turns_in_the_train_length(length: int) -> None:
    """Also for lengths at which the formula of transformers has its bounds in the wrong order."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": length}
    plain = frequencies(torch.arange(32, dtype=torch.float64), 64, 1e3)
    ratio, turns = scaled(yarn, 64, 1e3) / plain, plain * length / (2 * math.pi)
    assert torch.all(ratio[turns > 32] == 1)
    # The bounds are rounded outwards, by less than a pair.
    slow = torch.cat([torch.tensor([False]), turns < 1])[:-1] & (turns < 1)
    assert torch.allclose(ratio[slow][1:], torch.tensor(0.25).double(), rtol=1e-14)
    between = ratio[(turns < 32) & (turns > 1)]
    assert torch.all(between.diff() <= 0)
    assert torch.all((between >= 0.25) & (between <= 1))


@pytest.mark.parametrize("positions", ["rope", "p-rope"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_factor_of_1_changes_nothing(scaling: dict[str, Any], positions: str) -> None:
    plain = model(positions=positions)(TOKENS)
    assert torch.equal(model({**scaling, "factor": 1}, positions=positions)(TOKENS), plain)
    assert not torch.allclose(model(scaling, positions=positions)(TOKENS), plain, atol=1e-3)


def test_linear_divides_positions_by_the_factor() -> None:
    plain, interpolated = model(), model(LINEAR)
    for at in (3, 20):
        rotations = (
            interpolated._rotation(torch.tensor([4 * at])),
            plain._rotation(torch.tensor([at])),
        )
        assert torch.allclose(*rotations, rtol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", ["rope", "p-rope"])
def test_the_attention_factor_multiplies_queries_and_keys(positions: str) -> None:
    """Those that are not rotated too: the logits have one temperature."""
    changed = model({**YARN, "factor": 1, "attention_factor": 1.3}, positions=positions)
    plain = model(positions=positions)
    for layer in plain.layers:
        layer.get_parameter("qkv.weight")[:64] *= 1.3  # queries and keys: 4 heads × 8 features each
    assert torch.allclose(changed(TOKENS), plain(TOKENS), rtol=1e-10)
    x = rand(1, 1, 1, 8)
    for scaling in (YARN, {**YARN, "factor": math.e}):  # 0.1 · ln f + 1
        rotation = model(scaling, positions=positions)._rotation(torch.tensor([5]))
        norm = (0.1 * math.log(scaling["factor"]) + 1) * x.norm()
        assert rotate(x, rotation).norm() == pytest.approx(norm.item(), rel=1e-12)


@pytest.mark.parametrize("positions", ["rope", "p-rope"])
@pytest.mark.parametrize("variant", ["ssmax", "elu"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_caches_segments_and_padding_do_not_change_the_logits(
    scaling: dict[str, Any], variant: str, positions: str
) -> None:
    made = model(scaling, variant, positions=positions)
    expected = made(TOKENS)
    assert torch.allclose(made(TOKENS[:, :9]), expected[:, :9])  # later tokens change nothing
    caches = made.new_caches(14)
    parts = [made(TOKENS[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 14))]
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-6)
    packed = torch.cat([TOKENS[:, :5], TOKENS], 1)
    ids = (torch.arange(19) >= 5).long().expand(2, 19)
    assert torch.allclose(made(packed, segment_ids=ids)[:, 5:], expected, atol=1e-6)
    assert torch.allclose(made(packed, attn_mask=ids.bool()[:, None, None])[:, 5:], expected)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scaling_can_be_set_in_a_trained_model(scaling: dict[str, Any]) -> None:
    expected, made = model(scaling), model()
    plain, logits = made(TOKENS), expected(TOKENS)
    made.rope_scaling = scaling
    for changed in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(changed(TOKENS), logits)
        assert changed.rope_scaling is not None
        assert changed.rope_scaling.items() >= scaling.items()
    with pytest.raises(ValueError, match="rope_type"):
        made.rope_scaling = {"rope_type": "cubic"}
    assert torch.equal(made(TOKENS), logits)  # a wrong value changes nothing
    made.rope_scaling = made.rope_scaling  # with all keys
    assert torch.equal(made(TOKENS), logits)
    made.rope_scaling = None
    assert made.rope_scaling is None
    assert torch.equal(made(TOKENS), plain)
    assert expected.state_dict().keys() == made.state_dict().keys()


@pytest.mark.slow
def test_scaled_rope_in_a_graph() -> None:
    made = model(YARN)
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for scaling in (YARN, NTK, LINEAR, None):  # a new scaling is not that of the compiled graph
        made.rope_scaling = scaling
        assert torch.allclose(compiled(TOKENS), made(TOKENS), rtol=1e-10)


@pytest.mark.parametrize(
    ("scaling", "error", "message"),
    [
        ("yarn", TypeError, "rope_scaling must be a dict or None, got 'yarn'"),
        ({"factor": 2.0}, ValueError, "must be one of linear, ntk, yarn, got None"),
        ({**LINEAR, "rope_type": "dynamic"}, ValueError, "linear, ntk, yarn, got 'dynamic'"),
        ({**LINEAR, "rope_type": ["yarn"]}, ValueError, r"linear, ntk, yarn, got \['yarn'\]"),
        ({"rope_type": "ntk"}, ValueError, "type 'ntk' needs the key 'factor'"),
        (
            {**LINEAR, "rope_type": "yarn"},
            ValueError,
            "needs the key 'original_max_position_embeddings'",
        ),
        ({**LINEAR, "factr": 2}, ValueError, "has no key 'factr'; did you mean 'factor'"),
        ({**LINEAR, "rope_theta": 1e4}, ValueError, "has no key 'rope_theta'; it has: factor"),
        ({**LINEAR, "beta_fast": 32}, ValueError, "type 'linear' has no key 'beta_fast'"),
        ({**LINEAR, "factor": 0.5}, ValueError, r"\['factor'\] must be from 1 to .*, got 0.5"),
        ({**LINEAR, "factor": None}, TypeError, r"\['factor'\] must be a number .*, got None"),
        ({**LINEAR, "factor": float("nan")}, ValueError, r"\['factor'\] must be .*, got nan"),
        (
            {**YARN, "original_max_position_embeddings": 6.5},
            ValueError,
            r"\['original_max_position_embeddings'\] must be an int of at least 1, got 6.5",
        ),
        ({**YARN, "beta_slow": 0}, ValueError, "0 < beta_slow < beta_fast, got beta_slow = 0"),
        ({**YARN, "beta_fast": 0.01}, ValueError, "beta_slow = 0.05 and beta_fast = 0.01"),
        ({**YARN, "attention_factor": -1}, ValueError, r"\['attention_factor'\] must be from 0"),
    ],
)
def test_wrong_scalings_raise(scaling: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        model(scaling)


@pytest.mark.parametrize(
    ("scaling", "options", "message"),
    [
        (YARN, {"positions": "alibi"}, "rope_scaling must be None .* positions='alibi'"),
        (NTK, {"positions": "p-rope", "rope_share": 0}, "rope_scaling must be None"),
        (NTK, {"qk_dim": 2}, "type 'ntk' needs a head dimension above 2"),
        (YARN, {"rope_base": 1}, "type 'yarn' needs a rope_base above 1"),
    ],
)
def test_models_without_a_scaling_of_the_type_raise(
    scaling: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model(scaling, **options)
