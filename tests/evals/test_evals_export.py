"""Tables of results for README and papers, and the command ``export``."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from evals.__main__ import main
from evals.reporting.formats import escape, latex_table
from evals.reporting.pages import overview
from evals.results.store import Row
from evals.results.summary import Series, groups
from evals.results.summary_csv import csv_text, read_summary, summary_of
from helpers.evals_rows import grid, row, trial, written


def rows(scores: dict[str, tuple[float | None, ...]], lengths: tuple[int, ...]) -> list[Row]:
    """Result rows of max-retrieval (train length 16): two seeds with the same ``scores``."""
    return grid({
        variant: {n: (score, score) for n, score in zip(lengths, values, strict=True)}
        for variant, values in scores.items()
    })  # fmt: skip


def table_rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_overview_shows_train_length_longest_length_and_effective_length(tmp_path: Path) -> None:
    result_rows = rows(
        {
            "softmax": (1.0, 0.87, 0.86, 0.3),  # 0.86 − 0.1 is not above 85 % of 1.0 − 0.1
            "ssmax": (1.0, 0.9, 0.9, 0.88),
            "sigmoid": (0.9, 0.9, 0.9, 0.2),  # untrained: 0.9 at length 16
            "dips": (1.0, 0.5, 0.99, 0.1),
            "fails": (1.0, 0.9, None, None),
            "gap": (1.0, None, 0.9, 0.15),
        },
        (16, 32, 64, 128),
    )
    assert overview(tmp_path) == "Nothing has been measured yet.\n"
    (tmp_path / "max-retrieval.csv").write_text(csv_text(groups(result_rows)))
    text = overview(tmp_path)
    assert text.splitlines()[0] == (
        "| variant | accuracy (%) at the train length, n = 16 | accuracy (%) at n = 128 "
        "| effective length, n |"
    )
    assert table_rows(text) == [
        ["`ssmax`", "100.0", "88.0", "≥ 128"],
        ["`softmax`", "100.0", "30.0", "32"],
        ["`sigmoid` † 2/2", "90.0", "20.0", "—"],
        ["`gap`", "100.0", "15.0", "64"],
        ["`dips`", "100.0", "10.0", "16"],
        ["`fails`", "100.0", "—", "≥ 32"],  # no drop was seen
    ]
    assert "mean of 2 seeds, chance 10 %" in text
    assert "above 85 % of that at the train length" in text
    assert "† k/2: did not reach 95 % at the train length (n = 16) in k of 2 seeds" in text


def test_rows_and_their_summary_give_the_same_scores(tmp_path: Path) -> None:
    result_rows = rows({"softmax": (0.75, 0.5), "ssmax": (0.5, None)}, (16, 64))
    # The third seed of softmax failed at every length.
    result_rows += [row("softmax", None, seed=2, length=length) for length in (16, 64)]
    (group,) = groups(result_rows)
    (tmp_path / "max-retrieval.csv").write_text(csv_text([group]))
    one, other = summary_of(group), read_summary(tmp_path / "max-retrieval.csv")
    assert (other.seeds, other.lines[Series("softmax")].untrained) == (3, 3)
    assert one == other


# ---- export


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 8 results: 2 variants × 2 lengths × 2 seeds. The last result failed."""
    scores = {"softmax": {16: (0.96, 0.98), 64: (0.5, 0.52)},
              "ssmax(s=0.4)": {16: (0.9, 0.92), 64: (0.6, None)}}  # fmt: skip
    return written(tmp_path / "results", grid(scores))


def exported(folder: Path, *arguments: str) -> int:
    return main(["export", str(folder), *arguments])


def test_csv_has_a_line_per_variant_length_and_metric(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(folder, "--format", "csv") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["variant"], line["length"], line["mean"]) for line in lines] == [
        ("ssmax(s=0.4)", "16", "0.91"), ("ssmax(s=0.4)", "64", "0.6"),
        ("softmax", "16", "0.97"), ("softmax", "64", "0.51"),
    ]  # fmt: skip
    first = lines[0]
    assert (first["interval_low"], first["interval_high"], first["seeds"]) == (
        "0.782938",
        "1.03706",
        "2",
    )
    assert (first["untrained_seeds"], first["chance"], first["train_length"]) == ("2", "0.1", "16")
    assert (lines[1]["failed"], lines[1]["seeds"], lines[1]["standard_error"]) == ("oom", "1", "")
    assert (lines[2]["effective_length"], lines[2]["drops"]) == ("16", "1")
    assert (first["effective_length"], first["drops"]) == ("", "")  # not trained


def test_markdown_has_the_format_of_the_readme_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(folder, "--format", "markdown") == 0
    text = capsys.readouterr().out
    assert table_rows(text) == [
        ["`ssmax(s=0.4)` † 2/2", "91.0 (78.3–103.7)", "60.0*", "—"],
        ["`softmax`", "97.0 (84.3–109.7)", "51.0 (38.3–63.7)", "16"],
    ]
    assert text.startswith("**max-retrieval**: Accuracy, %, by eval length n. Mean of 2 seeds")


def test_latex_is_a_bare_tabular_with_mean_and_interval(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(folder, "--format", "latex") == 0
    text = capsys.readouterr().out
    comments = [line for line in text.splitlines() if line.startswith("%")]
    assert any("did not reach 95 %" in line for line in comments)
    assert text.splitlines()[len(comments) :] == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r" & \multicolumn{2}{c}{Eval length $n$} & Effective \\",
        r"\cmidrule(lr){2-3}",
        r"Variant & 16 & 64 & length \\",
        r"\midrule",
        r"ssmax(s=0.4)$^{\dagger\,2/2}$ & 91.0 {\scriptsize [78.3, 103.7]} & "
        r"60.0\textsuperscript{*} & --- \\",
        r"softmax & 97.0 {\scriptsize [84.3, 109.7]} & 51.0 {\scriptsize [38.3, 63.7]} & 16 \\",
        r"\midrule",
        r"Chance & 10.0 & 10.0 &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


SPECIAL = "[a_1]*\\x{y} 100% $z^2$ #~<b>|&\"'`\u2028\n% end->log_n(s=1)"


def test_latex_special_characters_are_escaped() -> None:
    assert escape("a_1 & 5% of $x^2$ #1 ~") == (
        r"a\_1 \& 5\% of \$x\textasciicircum{}2\$ \#1 \textasciitilde{}"
    )
    assert escape("a\\b{c}->d") == r"a\textbackslash{}b\{c\}$\to$d"
    assert escape("[a]\n* b\u2028c") == "{[}a{]} {*} b c"
    (group,) = groups(rows({SPECIAL: (0.5,)}, (16,)))
    lines = latex_table(summary_of(group), group.task.score).splitlines()
    # The line break in the name does not add a row.
    assert sum(line.endswith(r"\\") for line in lines) == 4


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex with booktabs")
def test_latex_compiles(tmp_path: Path) -> None:
    result_rows = rows({SPECIAL: (0.5, None), "softmax->ssmax": (0.9, 0.4)}, (16, 64))
    (group,) = groups(result_rows)
    page = (
        r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        "\n" + latex_table(summary_of(group), group.task.score) + r"\end{document}"
    )
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").exists()


@pytest.mark.slow
def test_figures_are_valid_and_reproducible(folder: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert exported(folder, "--figures", "png,svg,pdf", "--out", str(one)) == 0
    assert exported(folder, "--figures", "svg,pdf", "--format", "csv", "--out", str(other)) == 0
    start = "max-retrieval-accuracy"
    assert {path.name for path in one.iterdir()} == {f"{start}.{x}" for x in ("png", "svg", "pdf")}
    assert {path.name for path in other.iterdir()} == {
        f"{start}.{x}" for x in ("svg", "pdf", "csv")
    }
    with Image.open(one / f"{start}.png") as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10
    root = ElementTree.parse(one / f"{start}.svg").getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "ssmax(s=0.4)" in texts  # SVG text is not drawn as outlines
    pdf = (one / f"{start}.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert b"CreationDate" not in pdf
    for kind in ("svg", "pdf"):
        file = f"{start}.{kind}"
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_effective_lengths_do_not_depend_on_the_lengths_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"ssmax": (0.98, 0.97, 0.9, 0.2), "softmax": (0.98, 0.5, 0.2, 0.1)}
    folder = written(tmp_path / "results", rows(scores, (16, 32, 64, 128)))
    for lengths in ("16,128", "32,128", "16,32,64,128"):
        assert exported(folder, "--format", "csv", "--lengths", lengths) == 0
        lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [line["length"] for line in lines] == 2 * lengths.split(",")
        assert {line["variant"]: line["effective_length"] for line in lines} == {
            "ssmax": "64",
            "softmax": "16",
        }


def test_options_metric_and_lengths_select_results(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert exported(folder, "--format", "latex", "--metric", "all", "--out", str(out)) == 0
    assert len(list(out.iterdir())) == 7
    one = tmp_path / "one.csv"
    arguments = ("--metric", "hit_rate,accuracy", "--lengths", "64")
    assert exported(folder, "--format", "csv", *arguments, "--out", str(one)) == 0
    lines = list(csv.DictReader(one.read_text().splitlines()))
    assert {line["length"] for line in lines} == {"64"}
    assert {line["metric"] for line in lines} == {"hit_rate", "accuracy"}


def test_each_setting_of_a_task_has_its_own_files(tmp_path: Path) -> None:
    result_rows = [row("softmax", 0.5), row("softmax", 0.6, key="other", device="cuda:0")]
    folder = written(tmp_path / "results", result_rows)
    out = tmp_path / "out"
    assert exported(folder, "--format", "markdown", "--out", str(out)) == 0
    files = {path.name: path.read_text() for path in out.iterdir()}
    assert set(files) == {"max-retrieval-accuracy.md", "max-retrieval_2-accuracy.md"}
    assert all("(device c" in text for text in files.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "export needs --format or --figures"),
        (("--figures", "png"), "--figures needs --out DIR, got no --out"),
        (("--figures", "gif", "--out", "x"), "--figures must be among png, svg, pdf, got gif"),
        (("--format", "csv", "--metric", "no"), "--metric must be among accuracy, hit_rate, "),
        (("--format", "csv", "--lengths", "7"), "--lengths must be among 16, 64, got 7"),
        (("--format", "csv", "--lengths", "16,16"), "--lengths must not repeat an entry, got 16"),
        (("--format", "csv", "--out", "x.tex"), "--out must end in .csv with --format csv, got "),
        (("--format", "csv", "--out", "there.txt"), "--out must be a folder or a .csv, .tex, .md "),
    ],
)
def test_wrong_arguments_are_errors_and_write_nothing(
    arguments: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.txt").write_text("mine")
    assert exported(folder, *arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert Path("there.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"there.txt", "results"}


def test_results_without_figures_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "results", [trial(row("sink", 0.7))])
    assert main(["export", str(folder), "--figures", "svg", "--out", str(tmp_path / "out")]) == 2
    assert "error: --figures needs results that have figures" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert exported(folder, "--format", "csv", "--out", str(tmp_path / "file" / "x.csv")) == 2
    assert "could not be written" in capsys.readouterr().err
