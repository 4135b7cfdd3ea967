"""Wrappers and values per head on the command line of the evals."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnzoo.nn import Differential, DifferentialV2, MixtureAttention
from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.__main__ import main
from evals.measures.heads import substituted
from evals.results.store import read_rows
from evals.tasks import TASKS


def call(text: str) -> VariantCall:
    return parse_spec(text, wrappers=True).train


def test_text_is_read_and_written_and_identity_has_the_wrapper_with_its_defaults() -> None:
    for text in (
        "differential(softmax)",
        "mixture(ssmax(s=0.4), components=3)",
        "output_gate(log_n(train_length=16), per='head')",
        "asentmax(scaled=(1, 0, 0.5))",
    ):
        assert str(call(text)) == text
    plain, wrapped = call("softmax").identity(), call("laser(softmax)").identity()
    assert wrapped == {**plain, "wrapper": "laser", "wrapper_params": {"clamp": "15.0"}}
    assert "wrapper" not in plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("differential", r"is a wrapper and needs one variant, as in differential\(softmax\)"),
        ("differential()", "differential is a wrapper and needs one variant"),
        ("differential(softmax, ssmax)", "differential is a wrapper and needs one variant"),
        ("laser(differential(softmax))", "a wrapper cannot have a wrapper"),
        ("mixture(softmax, parts=2)", "mixture has no argument parts; it has: components"),
        ("entmax(softmax)", "parameters of entmax must have names.*wrappers are differential"),
        ("laser(softmax)->softmax", "a and b of a->b must have the same wrapper"),
        ("asentmax(scaled=())", "must be a number, .* or a tuple of numbers"),
        ("asentmax(scaled=('a', 1))", "must be a number, .* or a tuple of numbers"),
    ],
)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_spec(text, wrappers=True)
    with pytest.raises(UsageError, match="this command does not support wrappers"):
        parse_spec("laser(softmax)")


@pytest.mark.parametrize("name", ["max-retrieval", "mqar"])
def test_models_have_the_wrapper_and_a_substitution_replaces_the_variant_inside(name: str) -> None:
    task = TASKS[name]
    settings = task.presets["smoke"].settings
    for text, kind in (
        ("differential(softmax)", Differential),
        ("differential_v2(ssmax)", DifferentialV2),
        ("mixture(entmax, components=3)", MixtureAttention),
    ):
        model = task.build(call(text), task.positions[-1], settings)
        wrappers = [module for module in model.modules() if isinstance(module, kind)]
        (variant,) = {module.variant for module in wrappers}
        heads = [module.attention.num_heads for module in wrappers]
        with substituted(model, call(text.replace(variant, "sigmoid"))):
            assert {module.variant for module in wrappers} == {"sigmoid"}
            assert [module.attention.num_heads for module in wrappers] == heads
        assert {module.variant for module in wrappers} == {variant}


@pytest.mark.slow
def test_a_run_measures_every_map(tmp_path: Path) -> None:
    """Weights of both maps are measured, and the differences are the weights of the query."""
    arguments = ["max-retrieval", "--preset", "smoke", "--steps", "5", "--lengths", "16,32"]
    variants = "differential(softmax),differential(softmax)->differential(entmax)"
    assert main([*arguments, "--variants", variants, "--workers", "0", "--out", str(tmp_path)]) == 0
    rows = read_rows([tmp_path])
    assert {row["variant"] for row in rows} == {*variants.split(",")}
    for row in rows:
        assert row["status"] == "ok"
        assert len(row["curves"]["head_peak"]) == 2
        # λ of layer 0 is near 0.2, and both maps sum to 1.
        assert row["metrics"]["weight_sum"] == pytest.approx(0.8, abs=0.2)


def test_values_per_head_need_as_many_as_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = "asentmax(scaled=(1, 0, 0))"
    arguments = ["mqar", "--preset", "smoke", "--variants", variant, "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "asentmax's scaled must have shape () or (2,), got (3,)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
