"""The command ``laws`` confirms correct closed forms of weights and reports wrong ones."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import evals.reporting.laws as command
import evals.theory.closed_forms as forms
from attnzoo.core import plugins, registry
from commandline.errors import UsageError
from commandline.table import Table
from evals.__main__ import main
from evals.measures.arithmetic import lean_arithmetic
from evals.theory import laws
from evals.theory.laws import LAWS, Law

BY_NAME = {str(law): law for law in LAWS}


@pytest.mark.slow
def test_every_law_holds_and_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for shown in (*BY_NAME, "leading term for n → ∞", "‖∂w/∂z‖₂"):
        assert shown in text
    assert (tmp_path / "laws.png").read_bytes()[:4] == b"\x89PNG"
    lines = pd.read_csv(tmp_path / "laws.csv")
    assert set(lines["n"]) == set(laws.LENGTHS)
    assert set(lines["gap"]) == {"fixed", "shrinking", "uniform"}
    assert set(lines["failed"]) == {0}


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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("softmx", "unknown variant 'softmx'; did you mean 'softmax'? --plugin FILE.py "),
        ("topk,topk", "--variants must not repeat an entry, got topk twice"),
    ],
)
def test_wrong_names_are_errors(
    names: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["laws", "--variants", names]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        Law("softmax", {}, lambda n, gap: 1 / (1 + n * math.exp(-gap))),  # correct: n − 1
        Law("sparsemax", {}, None, forms.entmax_law("sparsemax", {}, 1.8).shrinking),
        Law("softmax", {}, None, lambda n, kappa: math.nan),
        Law("entmax", {}, uniform=lambda n: 1 / n),  # 1/n is the law of softmax
        Law("softmax", {}, uniform=lambda n: 0.0),
    ],
)
def test_wrong_law_is_reported_as_broken(
    wrong: Law, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.check_laws(tmp_path, laws=(wrong,)) == 1
    assert f"broken: {wrong.variant}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "form", "arguments", "value"),
    [  # computed by hand
        ("softmax", "fixed", (2, math.log(3)), 3 / 4),
        ("sigmoid", "fixed", (3, math.log(3)), 1 / 2),
        ("sparsemax", "fixed", (4, 0.5), 5 / 8),
        ("entmax", "fixed", (2, 0.0), 1 / 2),
        ("entmax", "fixed", (10**12, 1.0), 1 / 4),
        ("entmax", "fixed", (4, 2.0), 1.0),
        ("log_n(train_length=16)", "fixed", (16, math.log(5)), 1 / 4),  # 1 / (1 + 15 / 5)
        ("sparsemax", "holds", (1024, 0.001), False),  # all n keys would have a weight
        ("sparsemax", "holds", (1024, laws.KAPPA), True),
        ("softmax", "uniform", (16,), 1 / 16),
        ("entmax", "uniform", (16,), 1 / 4),
        ("sparsemax", "uniform", (16,), 1.0),
        ("ssmax(s=0.43)", "uniform", (4,), 0.43 * math.log(2) / 2),
        ("sigmoid", "uniform", (3,), 3 / 16),
    ],
)
def test_closed_form_values(name: str, form: str, arguments: tuple, value: float) -> None:
    assert getattr(BY_NAME[name], form)(*arguments) == pytest.approx(value, rel=1e-5)


def test_jacobian_laws_are_exact() -> None:
    with lean_arithmetic():
        points = laws.measure(lengths=())
    assert set(points["variant"]) == set(BY_NAME)
    assert (points["deviation"] < 1e-12).all()


# ---- laws of plugins

PLUGIN = """
import attnzoo
from evals.theory.laws import Law

def weights(q, k, call):
    return attnzoo.get_variant("softmax").weights(q, k, call)

attnzoo.register_variant(attnzoo.Variant("stated", "softmax(z)", "none", weights))
LAWS = {laws}
"""


@pytest.fixture
def only_plugin_laws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only laws of plugins are checked. After the test, their variants are unregistered."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(command, "LAWS", ())
    yield
    sys.modules.pop("laws_plugin", None)


def plugin(folder: Path, stated: str) -> Path:
    path = folder / "laws_plugin.py"
    path.write_text(PLUGIN.format(laws=stated))
    return path


def checked(path: Path, variants: str | None = None) -> int:
    return command.main(Namespace(out=None, plugin=path, variants=variants))


@pytest.mark.parametrize(("power", "status"), [("1", 0), ("2", 1)], ids=["right law", "wrong law"])
@pytest.mark.usefixtures("only_plugin_laws")
def test_laws_of_a_plugin_are_checked(
    power: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plugin(tmp_path, f'(Law("stated", {{}}, uniform=lambda n: n ** -{power}),)')
    assert checked(path, "stated") == status
    text = capsys.readouterr().out
    assert ("broken: stated, Jacobian at equal scores, n = 16" in text) == bool(status)
    assert "stated " in text


@pytest.mark.parametrize("stated", ["3", "(1,)", '(Law("no_such_variant"),)'])
@pytest.mark.usefixtures("only_plugin_laws")
def test_invalid_laws_of_a_plugin_raise(stated: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="LAWS of a plugin must"):
        checked(plugin(tmp_path, stated))


@pytest.mark.usefixtures("only_plugin_laws")
def test_plugin_without_laws_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Law] = []
    monkeypatch.setattr(
        command, "check_laws", lambda out, held, others: measured.extend(others) or 0
    )
    assert checked(plugin(tmp_path, "()")) == 0
    assert {"stated", "topk(top_k=8)"} < set(map(str, measured))


def column(table: Table, name: str) -> list[str]:
    return [line[table.header.index(name)] for line in table.rows]


def test_variant_without_law_is_measured() -> None:
    table = laws.measured_table(Law("topk", {"top_k": 4}), lengths=(16, 64))
    keep = math.exp(1.5) / (math.exp(1.5) + 3)  # topk keeps scores 1.5, 0, 0, 0
    assert column(table, "Δ=1.5") == [f"{keep:.6f}", f"{keep:.6f}", "0.000"]
    assert column(table, "Jacobian norm") == ["0.250000", "0.250000", "0.000"]  # 1 / top_k
    soft = laws.measured_table(Law("softmax"), lengths=(2**15, 2**16))
    assert column(soft, "Δ=1")[-1] == "-1.000"  # the weight is about e/n


def test_growth_is_the_exponent_between_the_two_largest_n() -> None:
    assert laws.growth({4: 9.0, 16: 2.0, 64: 0.25}) == pytest.approx(-1.5)
    assert laws.growth({4: 1.0, 16: 0.0}) is None


def test_laws_prints_the_reason_for_an_unsupported_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.check_laws(laws=(), measured_only=[Law("cosformer", {"max_length": 16})]) == 0
    assert "max_length=16 is below the length" in capsys.readouterr().out
