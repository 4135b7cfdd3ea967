"""Tables of the theory commands: written as CSV, read again, and shown in the report."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest

from commandline.table import Table, read_tables, tables_csv
from evals.__main__ import main
from evals.reporting import artifacts
from evals.reporting.report import COMMANDS, stored
from evals.reporting.shown import ShownGroup
from helpers import evals_rows

TABLES = [
    Table("Ranks, and more", ["variant", "fp32"], [["a, b", "17"], ['"c"', "—"]], "two\nlines"),
    Table("No note", ["K", "1", "2"], [["<i>", "34", "629"]]),
]


def test_tables_written_as_csv_are_read_again() -> None:
    tables = read_tables(tables_csv(TABLES))
    assert [(t.title, t.header, t.rows) for t in tables] == [
        (t.title, t.header, t.rows) for t in TABLES
    ]
    assert [t.note for t in tables] == ["two lines", ""]
    assert read_tables("") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variant,fp32\nsoftmax,17\n", "has no note"),
        ("Title\nvariant,fp32\nsoftmax\n", "title, a header and rows as long|no note"),
        ("Title\nvariant,fp32\nsoftmax,17,17\nnote\n", "title, a header and rows as long"),
        ("Title\nnote\n", "title, a header and rows as long"),
        ("a,b\nvariant,fp32\nnote\n", "title, a header and rows as long"),
    ],
)
def test_text_that_is_not_a_table_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tables(text + "a,b\n")


def test_report_shows_the_tables_and_the_figure_of_theory_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "drawn", ShownGroup)  # without figures
    folder = evals_rows.written(tmp_path / "results", [evals_rows.row("softmax", 0.5)])
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "id='ranks'" not in page.read_text()
    (folder / "ranks.csv").write_text(tables_csv(TABLES))
    (folder / "in-context.csv").write_text(tables_csv(TABLES[:1]))
    (folder / "in-context.png").write_bytes(b"a figure")
    assert main(["report", str(folder), "--out", str(page)]) == 0
    html = page.read_text()
    for cell in ("Ranks, and more", "a, b", "17", "No note", "<i>", "629", *COMMANDS.values()):
        assert f">{escape(cell)}<" in html
    _, ranks, context = html.split("<section id=")[1:]
    assert ranks.startswith("'ranks'")
    assert context.startswith("'in-context'")
    assert "<img" not in ranks
    assert context.count("data:image/png;base64,YSBmaWd1cmU=") == 1
    for name in COMMANDS:
        assert f"<a href='#{name}'>{name}</a>" in html


def test_report_shows_a_pretrained_model_beside_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "drawn", ShownGroup)
    trial = evals_rows.trial(evals_rows.row("softmax", 0.5))
    folder = evals_rows.written(tmp_path, [trial, evals_rows.pretrained("as loaded", 16, 0)])
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    for name in ("classification", "pretrained"):
        assert f"<section id='{name}'" in page.read_text()


def test_results_in_several_folders_have_their_own_headings(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "ranks.csv").write_text(tables_csv(TABLES))
    sections = stored(folders)
    assert [section.heading for section in sections] == [f"ranks · {folder}" for folder in folders]
    assert len({section.ident for section in sections}) == 2


def test_file_with_other_contents_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = evals_rows.written(tmp_path, [evals_rows.row("softmax", 0.5)])
    (folder / "ranks.csv").write_text("variant,fp32\nsoftmax,17\n")
    assert main(["report", str(folder)]) == 2
    message = capsys.readouterr().err
    assert f"{folder}/ranks.csv" in message
    assert f"write it again with python -m evals ranks --out {folder}" in message
