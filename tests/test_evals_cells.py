"""Specs, refusals, the store and what is shown."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

import pytest

from evals import max_retrieval as task
from evals.__main__ import main
from evals.cells import Refused, Study, parse_spec, parse_specs, split_list
from evals.plots import length_axis, name_lines
from evals.progress import Progress, clock
from evals.report import report_html
from evals.store import Rows, write_whole
from evals.summary import estimate
from evals.tables import Table


def study(*specs: str, **settings: object) -> Study:
    chosen = task.Settings(**settings)  # type: ignore[arg-type]
    return Study(task.NAME, tuple(parse_specs(list(specs))), 1, (16,), chosen)


@pytest.mark.parametrize(
    ("text", "train", "test", "params", "canonical"),
    [
        ("softmax", "softmax", "softmax", {}, "softmax"),
        ("ssmax( s = .5,b=-1)", "ssmax", "ssmax", {"s": 0.5, "b": -1}, "ssmax(b=-1, s=0.5)"),
        (" softmax -> log_n(train_length=16)", "softmax", "log_n", {"train_length": 16},
         "softmax->log_n(train_length=16)"),
        ("a->b(x=True,y=None,z='w')", "a", "b", {"x": True, "y": None, "z": "w"},
         "a->b(x=True, y=None, z='w')"),
        ("softmax->softmax", "softmax", "softmax", {}, "softmax"),
    ],
)  # fmt: skip
def test_specs_are_read(text: str, train: str, test: str, params: dict, canonical: str) -> None:
    spec = parse_spec(text)
    assert (spec.train.name, spec.test.name, spec.test.params) == (train, test, params)
    assert str(spec) == canonical
    assert parse_spec(str(spec)) == spec
    assert spec.is_swap == ("->" in canonical)


def test_a_list_is_split_outside_parentheses() -> None:
    assert split_list("a, b(x=1,y=2),c->d(z=3)") == ["a", "b(x=1,y=2)", "c->d(z=3)"]


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a->", "->a", "a->b->c", "a(1)", "a(x)", "a(x=1", "a(**x)", "a(x=[1])", "a.b", "3",
     "a(x=open('f'))", "a()()", "a(x=1, x=2)"],
)  # fmt: skip
def test_specs_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="cannot read variant"):
        parse_spec(text)


REFUSED = {
    "unknown variant": (["--variants", "nosuch"], "unknown variant 'nosuch'; known: .*softmax"),
    "unknown swap": (["--variants", "softmax->nosuch"], "unknown variant 'nosuch'"),
    "unknown parameter": (["--variants", "ssmax(t=1)"], "no parameter 't'; it has: s, b"),
    "missing parameter": (["--variants", "cosformer"], "requires the parameter 'max_length'"),
    "bad value": (["--variants", "entmax(alpha=9)"], "alpha must be"),
    "too short": (["--variants", "cosformer(max_length=32)", "--lengths", "64"], "max_length"),
    "twice": (["--variants", "softmax,softmax"], "listed twice"),
    "not a spec": (["--variants", "softmax,,ssmax"], "cannot read variant ''"),
    "seeds": (["--seeds", "0"], "--seeds must be at least 1, got 0"),
    "steps": (["--steps", "0"], "--steps must be at least 1"),
    "workers": (["--workers", "-1"], "--workers must be at least 0"),
    "length": (["--lengths", "16,1"], "--lengths must be at least 2, got 1"),
    "lengths twice": (["--lengths", "16,16"], "twice"),
    "device": (["--device", "abacus"], "--device must be cpu, cuda or cuda:N"),
    "no such GPU": (["--device", "cuda:99"], "torch sees"),
    "no plugin": (["--plugin", "no/such/file.py"], "--plugin must be a Python file"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_written(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["max-retrieval", "--preset", "smoke", "--out", str(out), *options]) == 2
    shown = capsys.readouterr()
    assert re.search(rf"^error: .*{message}.*\n\Z", shown.err)
    assert not out.exists()


@pytest.mark.parametrize(
    "options", [["--preset", "huge"], ["--lengths", "many"], ["--nosuch"], ["--scale", "cube"]]
)
def test_unknown_options_end_with_usage(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["max-retrieval", *options])
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_plugin_that_fails_or_registers_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, message in (("1 / 0", "ZeroDivisionError"), ("", "registered no variant")):
        plugin = tmp_path / "plugin.py"
        plugin.write_text(text)
        assert main(["max-retrieval", "--plugin", str(plugin), "--out", str(tmp_path / "o")]) == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["max-retrieval", "--dry-run", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "9 variants × 3 seeds × 9 lengths = 243 rows, 0 of them" in text
    assert "21 trainings, 243 rows" in text  # seven trainings per seed serve nine variants
    assert "one-cycle cosine, 2000 steps" in text
    assert not out.exists()


def test_a_key_changes_with_whatever_the_figures_depend_on() -> None:
    base = study("softmax")
    swap = study("softmax->adaptive_temperature")
    (spec,), (swapped,) = base.specs, swap.specs
    keys = {
        base.row_key(spec, 0, 16),
        base.row_key(spec, 1, 16),
        base.row_key(spec, 0, 32),
        swap.row_key(swapped, 0, 16),
        study("softmax", steps=7).row_key(spec, 0, 16),
        study("softmax", scale="none").row_key(spec, 0, 16),
        study("softmax", sequences_to_1024=9).row_key(spec, 0, 16),
        Study(base.task, base.specs, 1, (16,), base.settings, "cuda:1").row_key(spec, 0, 16),
        Study(base.task, base.specs, 1, (16,), base.settings, "cpu", {"softmax": "f00"}).row_key(
            spec, 0, 16
        ),
    }
    assert len(keys) == 9
    assert base.training_key(spec.train, 0) == swap.training_key(swapped.train, 0)
    # More seeds, lengths or variants leave a cell what it was.
    wider = Study(base.task, (*base.specs, *swap.specs), 5, (16, 99), base.settings)
    assert wider.row_key(spec, 0, 16) == base.row_key(spec, 0, 16)


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "rows.jsonl"
    rows = Rows(path)
    assert not path.parent.exists()
    for key in "abc":
        rows.append({"key": key, "value": 1.5})
    path.write_bytes(path.read_bytes()[:-5])  # the last line is cut
    rows = Rows(path)
    assert (sorted(rows.by_key), rows.damaged) == (["a", "b"], 1)
    rows.append({"key": "c", "value": 2.5})
    with path.open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"no": "key"}\n')
    rows = Rows(path)
    assert (sorted(rows.by_key), rows.damaged) == (["a", "b", "c"], 4)
    assert rows.by_key["c"]["value"] == 2.5
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.append({"key": "d", "value": float("nan")})
    assert json.loads(path.read_bytes().splitlines()[0]) == {"key": "a", "value": 1.5}


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_whole(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_estimates() -> None:
    found = estimate([0.5, 0.7, 0.9])
    assert found is not None
    assert found.text(100) == "70.0 ±11.5"  # s = 0.2, √3 seeds
    single = estimate([0.25])
    assert single is not None
    assert single.text(100, 1, sign=True) == "+25.0"
    assert estimate([]) is None


def test_a_table_is_aligned() -> None:
    table = Table("T", ["n", "16", "1024"], [["softmax", "9.5", "10"], ["x", "—", "1"]])
    assert table.text() == "T\nn         16  1024\nsoftmax  9.5    10\nx          —     1"


def test_the_report_escapes_text_and_needs_no_other_file() -> None:
    evil = "<script>alert('x')</script>&\""
    table = Table(evil, ["n", evil], [[evil, evil]])
    page = report_html(evil, [evil], [table], {evil: b"\x89PNG"}, [table], {evil: evil})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 9
    assert "width=device-width" in page
    for value in re.findall(r"(?:src|href)\s*=\s*['\"]?([^'\" >]*)", page):
        assert value.startswith("data:image/png;base64,")
    assert "url(" not in page
    assert "@import" not in page


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def test_progress_shows_a_bar_per_cell_and_nothing_off_a_terminal() -> None:
    screen, file = Screen(), io.StringIO()
    for stream in (screen, file):
        bars = Progress(2, stream)
        bars.update("softmax seed 0", 0.25, "training")
        bars.update("ssmax seed 0", 0.5, "n = 64")
        bars._drawn = 0.0
        bars.update("ssmax seed 0", 0.75, "n = 128")
        bars.finish("ssmax seed 0")
        bars.close()
    assert file.getvalue() == ""
    text = screen.getvalue()
    assert re.search(r"█{5}░{15}  25% +\d:\d\d left  softmax seed 0  training", text)
    assert re.search(r"█{15}░{5}  75% +\d:\d\d left  ssmax seed 0  n = 128", text)
    assert re.search(r"█{20} 100% +\d:\d\d taken  ssmax seed 0  done", text)
    assert "1 of 2 cells" in text
    assert clock(3661) == "1:01:01"


def test_line_names_do_not_overlap() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_ylim(0, 1)
    length_axis(axes, [16, 32])
    name_lines(axes, [(f"v{i}", 0.5 + i / 1000, "black") for i in range(9)], log=False)
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert len(heights) == 9
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.045
