"""The command ``laws`` confirms correct closed forms of weights and reports wrong ones."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import evals.reporting.laws as command
import evals.theory.closed_forms as forms
import evals.theory.laws as laws
from attnzoo.core import plugins, registry
from commandline.errors import UsageError
from commandline.table import Table
from commandline.variants import VariantCall
from evals.__main__ import main
from evals.measures.arithmetic import lean_arithmetic


@pytest.mark.slow
def test_every_law_holds_and_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for law in laws.LAWS:
        assert f"{law}: " in text
    assert "leading term for n → ∞" in text
    assert (tmp_path / "laws.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "laws.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert "‖∂w/∂z‖₂" in text
    assert {int(line["n"]) for line in lines} == set(laws.LENGTHS)
    assert {line["gap"] for line in lines} == {"fixed", "shrinking", "uniform"}
    assert all(line["failed"] == "0" for line in lines)


@pytest.mark.slow
def test_option_variants_selects_the_laws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["laws", "--variants", "softmax, topk", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "softmax: " in text
    assert "topk(top_k=8): measured only" in text
    assert "sigmoid" not in text
    assert "sink" not in text
    assert main(["laws", "--variants", "topk", "--out", str(tmp_path)]) == 0  # no closed form
    assert main(["laws", "--variants", "softmx"]) == 2
    assert "--variants: unknown variant 'softmx'" in capsys.readouterr().err
    assert main(["laws", "--variants", "topk,topk"]) == 2
    assert "--variants must not repeat an entry, got topk twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        laws.Law("softmax", {}, lambda n, gap: 1 / (1 + n * math.exp(-gap))),  # correct: n − 1
        laws.Law("sparsemax", {}, None, forms.entmax_shrinking(1.8)),
        laws.Law("softmax", {}, None, lambda n, kappa: math.nan),
        laws.Law("entmax", {}, uniform=lambda n: 1 / n),  # 1/n is the law of softmax
        laws.Law("softmax", {}, uniform=lambda n: 0.0),
    ],
)
def test_wrong_law_is_reported_as_broken(
    wrong: laws.Law, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(tmp_path, laws=(wrong,)) == 1
    assert f"broken: {wrong.variant}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("law", "n", "gap", "value"),
    [  # computed by hand
        (forms.softmax_fixed, 2, math.log(3), 3 / 4),
        (forms.sigmoid_fixed, 3, math.log(3), 1 / 2),
        (forms.sparsemax_fixed, 4, 0.5, 5 / 8),
        (forms.entmax15_fixed, 2, 0.0, 1 / 2),
        (forms.entmax15_fixed, 10**12, 1.0, 1 / 4),
        (forms.entmax15_fixed, 4, 2.0, 1.0),
        (forms.with_log_gain(forms.softmax_fixed, 1.0), 5, 1.0, 5 / 9),
    ],
)
def test_closed_form_values(law, n: int, gap: float, value: float) -> None:
    assert law(n, gap) == pytest.approx(value, rel=1e-5)


def test_entmax_law_does_not_hold_if_its_support_exceeds_n() -> None:
    law = next(law for law in laws.LAWS if str(law) == "sparsemax")
    assert not law.holds(1024, 0.001)
    assert law.holds(1024, laws.KAPPA)


@pytest.mark.parametrize(
    ("law", "n", "value"),
    [  # computed by hand
        (forms.entmax_uniform(1.0), 16, 1 / 16),
        (forms.entmax_uniform(1.5), 16, 1 / 4),
        (forms.entmax_uniform(2.0), 16, 1.0),
        (forms.log_gain_uniform(0.5), 4, math.log(2) / 4),
        (forms.sigmoid_uniform, 3, 3 / 16),
    ],
)
def test_jacobian_norms_at_equal_scores(law, n: int, value: float) -> None:
    assert law(n) == pytest.approx(value, rel=1e-12)


def test_jacobian_laws_are_exact() -> None:
    with lean_arithmetic():
        points = [point for point in laws.measure(lengths=()) if point.gap == "uniform"]
    assert {str(point.law) for point in points} == {str(law) for law in laws.LAWS}
    assert all(point.deviation < 1e-12 for point in points)


# ---- laws of plugins

PLUGIN = """
import attnzoo
from evals.theory.laws import Law

def weights(q, k, call):
    return attnzoo.get_variant("softmax").weights(q, k, call)

attnzoo.register_variant(attnzoo.Variant("{name}", "softmax(z)", "none", weights))
LAWS = {laws}
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, variants of plugins are unregistered."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    monkeypatch.setattr(plugins, "_LOADED", {})
    yield
    sys.modules.pop("laws_plugin", None)


@pytest.fixture
def only_plugin_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LAWS", ())
    monkeypatch.setattr(command, "without_law", lambda laws: [])


def plugin(folder: Path, name: str, stated: str) -> Path:
    path = folder / "laws_plugin.py"
    path.write_text(PLUGIN.format(name=name, laws=stated))
    return path


@pytest.mark.parametrize(("power", "status"), [("1", 0), ("2", 1)], ids=["right law", "wrong law"])
@pytest.mark.usefixtures("only_plugin_laws")
def test_laws_of_a_plugin_are_checked(
    power: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = f'(Law("laws_stated", {{}}, uniform=lambda n: n ** -{power}),)'
    assert command.command(plugin=plugin(tmp_path, "laws_stated", stated)) == status
    text = capsys.readouterr().out
    assert ("broken: laws_stated, Jacobian at equal scores, n = 16" in text) == bool(status)
    assert "laws_stated " in text


@pytest.mark.parametrize("stated", ["3", "(1,)", '(Law("no_such_variant"),)'])
@pytest.mark.usefixtures("only_plugin_laws")
def test_invalid_laws_of_a_plugin_raise(stated: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="LAWS of a plugin must"):
        command.command(plugin=plugin(tmp_path, "laws_invalid", stated))


def test_plugin_without_laws_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LAWS", ())
    path = plugin(tmp_path, "laws_unstated", "()")
    measured = []
    monkeypatch.setattr(command, "main", lambda out, held, variants: measured.extend(variants) or 0)
    assert command.command(plugin=path) == 0
    assert VariantCall("laws_unstated") in measured
    assert VariantCall("topk", (("top_k", 8),)) in measured


def column(table: Table, name: str) -> list[str]:
    return [line[table.header.index(name)] for line in table.rows]


def test_variant_without_law_is_measured() -> None:
    table = command.measured_table(VariantCall("topk", (("top_k", 4),)), lengths=(16, 64))
    keep = math.exp(1.5) / (math.exp(1.5) + 3)  # topk keeps scores 1.5, 0, 0, 0
    assert column(table, "Δ=1.5") == [f"{keep:.6f}", f"{keep:.6f}", "0.000"]
    assert column(table, "Jacobian norm") == ["0.250000", "0.250000", "0.000"]  # 1 / top_k
    soft = command.measured_table(VariantCall("softmax"), lengths=(2**15, 2**16))
    assert column(soft, "Δ=1")[-1] == "-1.000"  # the weight is about e/n


def test_growth_is_the_exponent_between_the_two_largest_n() -> None:
    assert laws.growth([4, 16, 64], [9.0, 2.0, 0.25]) == pytest.approx(-1.5)
    assert laws.growth([4, 16], [1.0, 0.0]) is None


def test_laws_prints_the_reason_for_an_unsupported_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = VariantCall("cosformer", (("max_length", 16),))
    assert command.main(laws=(), variants=[call]) == 0
    assert "max_length=16 is below the length" in capsys.readouterr().out
