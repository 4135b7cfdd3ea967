"""attnzoo.nn.Transformer: position encodings, variants per layer, caches, training."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.nn import (
    AdaptiveSoftmax,
    Attention,
    KVCache,
    MixtureOutput,
    OutputLayer,
    StateCache,
    Transformer,
    parameter_groups,
)
from attnzoo.nn.transformer import POSITIONS
from helpers.cases import ALL_VARIANTS, NO_SCORE, params_of
from helpers.crossed import crossed
from helpers.kernel_paths import quick_variants

SIZES: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "depth": 2}


def tokens(n: int = 14, batch: int = 2) -> Tensor:
    return torch.randint(20, (batch, n), generator=torch.Generator().manual_seed(n))


def model(variant: Any = "softmax", positions: str = "rope", **options: Any) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(20, variant=variant, positions=positions, **{**SIZES, **options})
    return made.eval()


def supported(variant: str, positions: str) -> bool:
    return positions not in Transformer.BIASED or variant not in NO_SCORE


EXTRAS: dict[str, Any] = {"qk_norm": True, "qk_dim": 6, "layer_scale": 0.5}


def test_qk_norm_makes_the_logits_independent_of_the_scale_of_queries_and_keys() -> None:
    for qk_norm in (False, True):
        made, other = model(qk_norm=qk_norm), model(qk_norm=qk_norm)
        with torch.no_grad():
            for layer in other.layers:
                weight = layer.get_parameter("qkv.weight")
                weight[:64] *= 50  # queries and keys: 4 heads × 8 features each
            same = torch.allclose(made(tokens()), other(tokens()), atol=1e-4)
        assert same == qk_norm


def test_layer_scale_multiplies_the_outputs_of_attention_and_mlp() -> None:
    plain, one, none = model(), model(layer_scale=1.0), model(layer_scale=0.0)
    with torch.no_grad():
        assert torch.equal(plain(tokens()), one(tokens()))
        # Without the branches only embedding and last norm are left.
        assert torch.equal(none.states(tokens()), none.norm(none.embed(tokens())))
    for name, parameter in one.named_parameters():
        if "scale_" in name:
            torch.nn.init.constant_(parameter, 3.0)
    one.reset_parameters()
    assert {p.min().item() for n, p in one.named_parameters() if "scale_" in n} == {1.0}


@pytest.mark.parametrize("positions", POSITIONS)
def test_qk_dim_changes_only_queries_and_keys(positions: str) -> None:
    made = model(
        "taylor" if positions not in Transformer.BIASED else "softmax", positions, **EXTRAS
    )
    assert made.layers[0].get_parameter("qkv.weight").shape == (4 * (6 + 6 + 8), 32)
    with torch.no_grad():
        logits, caches = made(tokens()), made.new_caches(16)
        parts = [made(tokens()[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 14))]
    assert torch.allclose(torch.cat(parts, dim=1), logits, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": 1}, "qk_norm must be a bool, got 1"),
        ({"qk_dim": 0}, "qk_dim must be"),
        ({"qk_dim": 5}, "positions='rope' needs an even head dimension, got qk_dim = 5"),
        ({"layer_scale": -1.0}, "layer_scale must be from 0 to"),
        ({"layer_scale": "x"}, "layer_scale must be a number from 0 to"),
    ],
)
def test_wrong_extras_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        model(**options)


@pytest.mark.parametrize(
    ("variant", "positions"),
    crossed(quick_variants(ALL_VARIANTS, ("pairwise", "linear")), POSITIONS),
)
def test_caches_do_not_change_the_logits(variant: str, positions: str) -> None:
    if not supported(variant, positions):
        with pytest.raises(ValueError, match="alibi None"):
            model(variant, positions, **params_of(variant))(tokens())
        return
    made = model(variant, positions, num_kv_heads=2, **params_of(variant))
    with torch.no_grad():
        logits = made(tokens())
        caches, parts = made.new_caches(16), []
        for start, stop in ((0, 9), (9, 10), (10, 14)):
            parts.append(made(tokens()[:, start:stop], caches=caches))
    assert torch.allclose(torch.cat(parts, dim=1), logits, atol=1e-5)


def test_rope_scores_depend_on_distances_only() -> None:
    from attnzoo.nn.rope import rotate

    made = model(rope_base=100.0).double()
    q, k = torch.randn(2, 1, 1, 1, 8).double().unbind()

    def score(i: int, j: int) -> float:
        rotations = [made._rotation(torch.tensor([at])) for at in (i, j)]
        return float((rotate(q, rotations[0]) * rotate(k, rotations[1])).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-4)
    # With D = 8, RoPE rotates features 0 and 4, the first pair, by one radian per token.
    x = torch.zeros(1, 1, 1, 8)
    x[..., 0] = 1.0
    turned = rotate(x, made._rotation(torch.tensor([1])))[0, 0, 0]
    assert turned[[0, 4]].tolist() == pytest.approx([0.5403, 0.8415], abs=1e-4)


def test_nape_has_alibi_in_the_second_half_of_the_heads() -> None:
    made = Transformer(11, 48, num_heads=3, depth=1, positions="nape")
    assert made._slopes(torch.device("cpu")).tolist() == [0, 1, 1 / 2]
    two = Transformer(11, 48, num_heads=6, depth=1, positions="nape")
    assert two._slopes(torch.device("cpu")).tolist() == pytest.approx([0, 0, 0, 1, 1 / 2, 1 / 3])


def test_t5_learns_one_bias_per_distance_for_all_layers() -> None:
    slopes, made = model(positions="alibi"), model(positions="t5")
    assert made.relative_bias is not None
    with torch.no_grad():
        assert torch.allclose(made(tokens()), model(positions="none")(tokens()), atol=1e-6)
        # The first 16 buckets hold one distance each.
        heads = -slopes._slopes(torch.device("cpu"))
        made.relative_bias.weight[:16] = torch.arange(16)[:, None] * heads
        assert torch.allclose(made(tokens()), slopes(tokens()), atol=1e-5)
    made.loss(made.states(tokens()), tokens()).backward()
    assert made.relative_bias.weight.grad[:14].abs().min() > 0
    made.reset_parameters()
    assert not made.relative_bias.weight.any()


def test_p_rope_with_share_0_or_1_is_none_or_rope() -> None:
    with torch.no_grad():
        shares = {share: model(positions="p-rope", rope_share=share)(tokens()) for share in (0, 1)}
        assert torch.equal(shares[0], model(positions="none")(tokens()))
        assert torch.equal(shares[1], model(positions="rope")(tokens()))
    assert model(positions="p-rope").rotated_pairs == 3  # D = 8 has 4 pairs


def test_layers_with_different_variants_share_the_window() -> None:
    made = model([("entmax", {"alpha": 1.3}), "ssmax"], window=4)
    variants = [m.variant for m in made.modules() if isinstance(m, Attention)]
    assert variants == ["entmax", "ssmax"]
    with torch.no_grad():
        one, two = tokens(), tokens()
        two[:, 0] = (one[:, 0] + 1) % 20
        # With two layers and a window of 4 keys, an output depends on the 6 tokens before it.
        same = (made(one) == made(two)).all(-1).all(0)
    assert same.tolist() == [False] * 7 + [True] * 7


def test_new_caches_are_states_where_possible() -> None:
    made = model([("cosformer", {"max_length": 32}), "ssmax"])
    assert [type(cache) for cache in made.new_caches(32)] == [StateCache, KVCache]
    made = model([("cosformer", {"max_length": 32}), "taylor"], window=4)
    assert [type(cache) for cache in made.new_caches(32)] == [KVCache, KVCache]


@pytest.mark.parametrize("variant", quick_variants(ALL_VARIANTS, ("pairwise", "linear")))
def test_training_on_a_cycle_of_tokens_lowers_the_loss(variant: str) -> None:
    made = model(variant, dropout=0.0, **params_of(variant, 32)).train()
    optimizer = torch.optim.AdamW(made.parameters(), 1e-2)
    cycle = torch.arange(24).remainder(7).expand(4, 24) + torch.arange(4)[:, None]
    losses = []
    for _ in range(20):
        logits = made(cycle[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), cycle[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.9
    assert losses[-1] < 1.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"positions": "sine"},
            ValueError,
            "positions must be one of rope, p-rope, alibi, nape, t5, none",
        ),
        ({"embed_dim": 30}, ValueError, "embed_dim=30 is not a multiple of num_heads=4"),
        ({"num_kv_heads": 3}, ValueError, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"embed_dim": 12}, ValueError, "needs an even head dimension, got 12 // 4 = 3"),
        ({"depth": 0}, ValueError, "depth must be an int .* 1, got 0"),
        ({"window": 0}, ValueError, "window must be an int .* 1, got 0"),
        ({"dropout": 1.0}, ValueError, r"dropout must be a number in \[0, 1\)"),
        ({"rope_share": 2}, ValueError, r"rope_share must be from 0 to 1, got 2"),
        ({"rope_base": 0}, ValueError, "rope_base must be from 1 to .*, got 0"),
        ({"rope_base": float("nan")}, ValueError, "rope_base must be from 1 to .*, got nan"),
        ({"rope_base": 10**400}, ValueError, "rope_base must be from 1 to "),
        (
            {"variant": ["ssmax"]},
            ValueError,
            "variant must be one name or a list of 2 entries, one per layer, got 1",
        ),
        ({"variant": ["ssmax"] * 2, "s": 1.0}, TypeError, "s must be given in pairs"),
        (
            {"variant": ["softmax", "ssmax"], "postions": "none"},
            TypeError,
            "'ssmax' has no parameter 'postions'.*; did you mean 'positions'",
        ),
        ({"variant": "cosformer"}, TypeError, "max_length"),
        ({"variant": "nonsense"}, ValueError, "'nonsense'"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Transformer(20, **{**SIZES, **options})


def test_wrong_forward_arguments_raise() -> None:
    made = model()
    with pytest.raises(ValueError, match=r"must be int32 or int64 \(B, N\), got torch.float32"):
        made(torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"tokens must be an int tensor \(B, N\), got list"):
        made([[1, 2]])
    for wrong in (-1, 20):
        with pytest.raises(
            ValueError, match=f"tokens must be from 0 to vocab_size - 1 = 19, got {wrong}"
        ):
            made(torch.tensor([[3, wrong, 4]]))


def test_wrong_caches_raise() -> None:
    made = model()
    caches, one = made.new_caches(16), made.new_caches(8)[0]
    cases: list[tuple[Any, type, str]] = [
        (caches[:1], ValueError, "caches must hold 2 caches, one per layer, got 1"),
        (one, TypeError, "caches must be a list of caches, one per layer, got KVCache"),
        (["a", "b"], TypeError, r"caches\[0\] must be a KVCache or a StateCache, got 'a'"),
        ([one, one], ValueError, "a cache of its own for each layer, got one twice"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            made(tokens(), caches=wrong)
    with torch.no_grad():
        made(tokens(), caches=caches)
        caches[1].crop(1)
        with pytest.raises(ValueError, match=r"caches must have equal lengths, got \[\d+, 1\]"):
            made(tokens(), caches=caches)


# ---- output layer ----


@pytest.mark.parametrize("output", ["softmax", "entmax", "sigmoid"])
def test_the_output_layer_is_tied_and_its_loss_needs_no_logits(output: str) -> None:
    made, seen = model(output=output), tokens()
    states = made.states(seen[:, :-1])
    expected = attnzoo.losses.loss(made.logits(states), seen[:, 1:], output)
    assert torch.allclose(made.loss(states, seen[:, 1:]), expected)
    assert made.output.weight is made.embed.weight
    best = made.output.log_prob(states).exp().topk(2).values
    assert torch.allclose(made.output.topk(states, 2).values, best)


def test_an_output_layer_adds_only_its_own_parameters() -> None:
    """Checkpoints of a model with another output layer load, and initial weights are the same."""
    plain = model()
    names = set(plain.state_dict())
    assert not any(name.startswith("output") for name in names)
    options = {"alpha": 1.4, "learn": ("alpha",), "bias": True, "softcap": 20.0}
    other = model(output="entmax", output_params=options)
    added = set(other.state_dict()) - names
    assert added == {"output.bias", "output.parametrizations.alpha.original"}
    assert all(torch.equal(x, other.state_dict()[n]) for n, x in plain.state_dict().items())
    assert other.output.alpha.item() == pytest.approx(1.4)
    assert not bool(other.output.bias.any())  # type: ignore[union-attr]
    assert "(output): OutputLayer(" in repr(other)
    with pytest.raises(TypeError, match="output_params must be a dict or None"):
        model(output_params=3)


def test_copied_cast_and_materialized_models_stay_tied() -> None:
    made = model(output="sparsemax")
    with torch.device("meta"):
        empty = model(output="entmax", output_params={"learn": ("alpha",)})
    empty.to_empty(device="cpu").reset_parameters()
    assert empty.output.alpha.item() == pytest.approx(1.5)
    copies = copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.double(), empty
    for other in copies:
        assert other.output.weight is other.embed.weight
    with pytest.raises(AttributeError, match="set embed.weight"):
        made.output.weight = torch.nn.Parameter(torch.zeros(20, 32))


def test_training_with_a_sparse_output_layer_lowers_its_loss() -> None:
    made = model(output="entmax", output_params={"learn": ("alpha",)}).train()
    optimizer = torch.optim.AdamW(parameter_groups(made, 0.0), 3e-3)
    cycle = torch.arange(24).remainder(7).expand(4, 24) + torch.arange(4)[:, None]
    losses = []
    for _ in range(40):
        loss = made.loss(made.states(cycle[:, :-1]), cycle[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert bool((made.output.log_prob(made.states(cycle)) == -torch.inf).any())


def test_a_new_embedding_is_shared_with_the_output_layer() -> None:
    made = model()
    made.embed = torch.nn.Embedding(20, 32)
    assert any(p is made.output.weight for p in made.parameters())
    other = model()
    other.load_state_dict(made.state_dict())
    with torch.no_grad():
        assert torch.equal(other(tokens()), made(tokens()))
    with pytest.raises(ValueError, match=r"embed must have a weight of shape \(20, 32\)"):
        made.embed = torch.nn.Embedding(25, 32)
    with pytest.raises(ValueError, match="give Transformer an OutputLayer"):
        made.output.shard_classes(None)


@pytest.mark.parametrize(
    ("layer", "tied"),
    [
        (OutputLayer(32, 20, "entmax", softcap=5.0), True),
        (MixtureOutput(32, 20, 3), False),
        (MixtureOutput(32, 20, 3), True),
        (MixtureOutput(32, 20, 3, "sparsemax", mix="contexts"), True),
        (AdaptiveSoftmax(32, 20, [4, 9]), False),
    ],
    ids=["output", "mixture", "tied mixture", "contexts", "adaptive"],
)
def test_a_layer_can_be_given_as_output(layer: OutputLayer | AdaptiveSoftmax, tied: bool) -> None:
    layer = copy.deepcopy(layer)
    made, seen = model(output=layer), tokens()
    assert made.output is layer
    if tied:
        made.output.weight = made.embed.weight
    states = made.states(seen[:, :-1])
    assert torch.equal(made.loss(states, seen[:, 1:]), layer.loss(states, seen[:, 1:]))
    assert torch.equal(made(seen[:, :-1]), layer.logits(states))
    made.loss(states, seen[:, 1:]).backward()
    assert all(p.grad is not None for p in made.parameters())
    with torch.no_grad():
        before = [p.clone() for p in layer.parameters()]
        torch.manual_seed(5)
        made.reset_parameters()
        changed = [not torch.equal(p, q) for p, q in zip(before, layer.parameters(), strict=True)]
    assert all(changed)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(seen), made(seen))
        assert (getattr(other.output, "weight", None) is other.embed.weight) == tied


def test_a_layer_given_as_output_must_fit() -> None:
    with pytest.raises(ValueError, match="output must have in_features = 32, got 16"):
        model(output=MixtureOutput(16, 20, 2))
    with pytest.raises(ValueError, match="output must have num_classes = 20, got 21"):
        model(output=AdaptiveSoftmax(32, 21, [4]))
    with pytest.raises(TypeError, match="output_params must be None if output is a layer"):
        model(output=MixtureOutput(32, 20, 2), output_params={"bias": True})
    with pytest.raises(TypeError, match="output must be the name of a variant, an OutputLayer, a"):
        model(output=torch.nn.Linear(32, 20))


@pytest.mark.slow
def test_caches_of_a_model_with_compiled_layers() -> None:
    made = model("ssmax")
    made.layers[0] = torch.compile(made.layers[0], backend="eager")
    caches = made.new_caches(16)
    with torch.no_grad():
        made(tokens()[:, :13], caches=caches)
        last = made(tokens()[:, 13:], caches=caches)
        assert torch.allclose(last, made(tokens())[:, 13:], atol=1e-5)
