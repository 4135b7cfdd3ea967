"""Generated tables of README and docs/: marked blocks are filled, other text is kept."""

from __future__ import annotations

import doctest
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import attnzoo
from commandline.errors import UsageError
from commandline.table import Table, tables_csv
from helpers import evals_rows
from scripts import headlines, publish, tables, variant_facts
from scripts.benchmark_tables import cost_table, kernels_table, profile_table
from scripts.call_path import call_path
from scripts.families_table import FIELDS, RESULTS, TOLERANCE, families_facts, families_table
from scripts.variant_tables import support_table, variants_table


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.md"


def test_blocks_are_filled_and_the_text_around_them_is_kept(page: Path) -> None:
    blocks = [f"<!-- {name}: begin -->\noutdated\n<!-- {name}: end -->\n" for name in tables.BLOCKS]
    page.write_text("first\n" + "between\n".join(blocks) + "last\n")
    new = tables.rendered(page)
    assert new.startswith("first\n<!-- variants: begin -->\n| variant |")
    assert "|\n<!-- variants: end -->\nbetween\n<!-- tasks: begin -->\n- `max-retrieval`" in new
    assert new.endswith("<!-- profile: end -->\nlast\n")
    assert "outdated" not in new
    page.write_text(new)
    assert tables.rendered(page) == new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- tasks: begin -->\n", "each `begin` needs an `end`"),
        ("<!-- tasks: end -->\n<!-- tasks: begin -->\n", "each `begin` needs an `end`"),
        ("<!-- cats: begin -->\n<!-- cats: end -->\n", "unknown table cats; known: variants"),
    ],
)
def test_a_wrong_block_is_one_line_and_no_page_is_written(
    text: str, message: str, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    outdated = page.with_name("a.md")
    before = "# Title\n<!-- tasks: begin -->\n<!-- tasks: end -->\n"
    outdated.write_text(before)
    page.write_text(text)
    monkeypatch.setattr(tables, "pages", lambda: [outdated, page])
    assert tables.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m scripts.tables: {page}: {message}")
    assert error.count("\n") == 1
    assert outdated.read_text() == before


def test_the_path_of_a_call_goes_from_attention_to_a_backend() -> None:
    lines = [line.split() for line in call_path().splitlines()[1:-1]]
    assert lines[0] == ["functional/attention.py", "attention"]
    files = [first for first, *_ in lines if first.endswith(".py")]
    assert len(files) == len(set(files))
    steps = ("core/arguments.py", "variants/ssmax.py", "backends/sdpa.py")
    assert sorted(steps, key=files.index) == list(steps)


def test_docstring_examples_of_variant_facts_run() -> None:
    outcome = doctest.testmod(variant_facts)
    assert (outcome.failed, outcome.attempted) == (0, 2)


def test_the_table_of_arguments_is_what_calls_accept() -> None:
    lines = [line.strip("| ").split(" | ") for line in support_table().splitlines()]
    rows = {row[0].strip("`"): dict(zip(lines[0], row, strict=True)) for row in lines[2:]}
    assert list(rows) == attnzoo.list_variants()
    for name, column, value in (
        ("ssmax", "parameters", "`s=0.168`, `b=0`"),
        ("topk", "parameters", "`top_k` (required)"),
        ("forgetting", "without `is_causal`", "–"),
        ("taylor", "float masks, ALiBi", "–"),
        ("entmax", "`return_lse`", "–"),
        ("sink", "rows sum to 1", "–"),
    ):
        assert rows[name][column] == value
    linear = [name for name in rows if rows[name]["[state](decoding.md)"] == "yes"]
    assert linear == ["cosformer", "elu", "hedgehog", "taylor"]
    assert all(rows["softmax"][column] == "yes" for column in lines[0][2:-1])


def test_every_variant_has_a_row_with_its_use() -> None:
    table = variants_table(tables.ROOT / "README.md").splitlines()
    assert [line.split("`")[1] for line in table[2:]] == attnzoo.list_variants()
    assert all(line.count(" | ") == 3 and not line.endswith("|  |") for line in table)
    linked = variants_table(tables.ROOT / "docs" / "variants" / "index.md")
    assert "[`softmax`](softmax.md)" in linked


def test_versions_are_those_that_the_project_requires_and_tests(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""
        [project]
        requires-python = ">=3.11"
        dependencies = ["torch>=2.9", "numpy"]
        classifiers = ["Typing :: Typed", "Programming Language :: Python :: 3",
            "Programming Language :: Python :: 3.9", "Programming Language :: Python :: 3.11"]
        [project.optional-dependencies]
        gpu = ["triton>=3.6"]
        dev = ["triton", "transformers>=5.17"]
    """)
    newest, oldest = (tmp_path / name for name in tables.CONSTRAINTS)
    newest.write_text(
        "# tested\ntorch==2.13.0\n\ntriton==3.9.0\ntransformers==5.23.0\nnumpy==2.4.6\n"
    )
    oldest.write_text("torch==2.9.1\ntransformers==5.17.0\nnumpy==2.5.2; python_version > '3.11'\n")
    assert tables.versions_table(tmp_path).splitlines()[2:] == [
        "| Python | 3.11 or later | 3.9 | 3.11 |",
        "| PyTorch | 2.9 or later | 2.9.1 | 2.13.0 |",
        "| Triton | 3.6 or later | 3.9.0 | 3.9.0 |",
        "| transformers | 5.17 or later | 5.17.0 | 5.23.0 |",
        "| numpy | any | 2.4.6 | 2.5.2 |",
    ]


INTERFACE = "ValueError: model must use transformers' AttentionInterface, which BModel does not"
NONE = "ValueError: model must have attention layers, but CModel called none"
# Family, result, reason, variant, inputs, classes of other attention
FAMILIES = [
    ("a", "equal", "", "softmax", "input_ids attention_mask", ""),
    ("a", "not tried", "inputs: TypeError: …", None, None, None),
    ("b", "refused", INTERFACE, None, "input_ids", "BAttention"),
    ("c", "refused", NONE, None, "pixel_values", ""),
    ("d", "equal", "", "softmax", "pixel_values", ""),
    ("d", "refused", INTERFACE, None, "input_ids", "DAttention"),
    ("e", "differs", "", "softmax", "input_ids", ""),
    ("f", "not tried", "no model of its own", None, None, None),
    ("g", "equal", "", "sink", "input_ids decoder_input_ids", ""),
]


def test_families_are_grouped_by_result_and_reason(tmp_path: Path) -> None:
    names = "family", "result", "reason", "variant", "inputs", "other_attention"
    errors = {"output_error": 0.5, "gradient_error": 1e-7}
    rows = [dict(zip(names, row, strict=True)) | errors for row in FAMILIES]
    head = {"transformers": "5.1.0", "torch": "2.9.0", "date": "2026-01-31"}
    path = tmp_path / "families.json"
    path.write_text(json.dumps({**head, "rows": rows}))
    assert families_table(path).splitlines()[2:] == [
        "| equal, 1 | encoder-decoder, with `sink` | `g` |",
        "| equal, 1 | text | `a` |",
        "| equal in part, 1 | a part does not use transformers' `AttentionInterface` | `d` |",
        "| differs, 1 | outputs 0.5, gradients 1e-07 | `e` |",
        "| unsupported, 1 | does not use transformers' `AttentionInterface` | `b` |",
        "| no attention, 1 | nothing to convert | `c` |",
        "| not tried, 1 | has no model of its own: it uses that of another family | `f` |",
    ]
    assert families_facts(path) == (
        "7 families of transformers 5.1.0, tried with torch 2.9.0 on 2026-01-31: 2 equal, "
        "1 equal in part, 1 differs, 1 unsupported, 1 no attention, 1 not tried.\n"
    )


def test_stored_families_are_complete() -> None:
    stored = json.loads(RESULTS.read_text())
    rows = stored["rows"]
    assert [set(row) for row in rows] == [set(FIELDS)] * len(rows)
    assert {row["result"] for row in rows} <= {"equal", "differs", "refused", "not tried"}
    names = [row["family"] for row in rows]
    assert names == sorted(names)
    assert {"llama", "t5", "vit", "gpt_oss"} <= set(names)
    for row in rows:
        errors = row["output_error"], row["gradient_error"]
        if row["result"] == "equal":
            assert max(errors) <= TOLERANCE
            assert row["converted"] > 0
        else:
            assert row["reason"] or max(map(float, errors)) > TOLERANCE


def results(device: str = "NVIDIA Test", date: str = "2026-01-31", tflops: float = 410.0) -> Any:
    spread = {"median": 0.9, "lower": 0.8, "upper": 1.0, "count": 10}
    measured = {
        "name": "ssmax", "kind": "variant", "direction": "forward", "head_dim": 64, "causal": True,
        "length": 16384, "batch": 4, "heads": 16, "dtype": "bfloat16", "inputs": "iid",
        "figures": {"tflops": tflops}, "ratios": {"sdpa flash": spread},
    }  # fmt: skip
    baseline = {**measured, "name": "sdpa flash", "kind": "baseline", "ratios": {}}
    other = {**measured, "inputs": "block-sparse", "figures": {"tflops": 1.0}}
    untimed = {**measured, "name": "taylor", "figures": {}}
    where = {"device": device, "date": date, "torch": "2.11.0", "packages": {"triton": "3.6.0"}}
    return {"environment": where, "rows": [measured, baseline, other, untimed]}


def test_kernels_table_is_made_from_the_newest_results(tmp_path: Path) -> None:
    assert kernels_table(tmp_path) == "No GPU has been measured yet.\n"
    named = {"b": results(date="2026-01-30", tflops=1.0), "a": results(), "c": results("Another")}
    for name, document in named.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    first, second = kernels_table(tmp_path).split("NVIDIA Test")
    assert first.startswith("Another, torch 2.11.0, Triton 3.6.0, 2026-01-31: TFLOP/s, causal,")
    about, _, header, _, *lines = second.splitlines()
    assert "N = 16384, B = 4, H = 16" in about
    columns = "| forward, D = 64 | backward, D = 64 | forward, D = 128 | backward, D = 128 |"
    assert header == f"|  {columns}"
    assert lines[0] == "| `ssmax` | 410 (0.90, –) | – | – | – |"
    assert lines[1] == "| sdpa flash | 410 | – | – | – |"


def test_cost_table_has_ratios_to_softmax_and_a_row_for_every_variant(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    assert cost_table(file) == "No CPU has been measured yet.\n"
    row = {
        "case": "softmax", "direction": "forward", "seconds": {"median": 0.1}, "ratios": {},
        "peak_bytes": 3_000_000, "causal": True, "dtype": "float32", "batch": 1, "heads": 2,
        "length": 1024, "head_dim": 64,
    }  # fmt: skip
    ratios = {"softmax": {"median": 1.26, "lower": 1.0, "upper": 1.5, "count": 7}}
    other = {**row, "case": "entmax", "direction": "backward", "ratios": ratios, "peak_bytes": None}
    wrong = {**other, "case": "taylor", "seconds": None, "ratios": {}}
    where = {"cpu": "Test CPU", "torch": "2.11.0", "date": "2026-01-31", "threads": 2}
    file.write_text(json.dumps({"environment": where, "rows": [row, other, wrong]}))
    about, _, _, _, *lines = cost_table(file).splitlines()
    assert about.startswith("Test CPU, 2 threads, torch 2.11.0, 2026-01-31: causal, float32, B = 1")
    assert [line.split("`")[1] for line in lines] == attnzoo.list_variants()
    assert "| `softmax` | N²·D | 1 | – | 3 | – |" in lines
    assert "| `entmax` | N²·D, and a threshold solved per row | – | 1.3 | – | – |" in lines
    (taylor,) = (line for line in lines if "`taylor`" in line)
    assert taylor.endswith("| – | – | – | – |")
    file.write_text(json.dumps({"environment": where, "rows": [{**row, "peak_bytes": None}]}))
    assert "| `softmax` | N²·D | 1 | – |\n" in cost_table(file)


def counted() -> dict[str, Any]:
    predicted = {"tflops": 595.2}
    full = {
        "name": "full", "total": 10.6, "classes": {"fp32": 4.09, "mufu": 1.03, "mask": 0.03,
        "integer": 1.8}, "tensor_factor": 1.0, "element_factor": 1.0, "predicted": predicted,
    }  # fmt: skip
    edge = {**full, "name": "edge", "total": 16.7}
    row = {
        "kernel": "forward", "activation": "exp", "arch": "sm_90", "head_dim": 128,
        "extra": "full no gain", "stack_bytes": 0, "loops": [full, edge],
    }  # fmt: skip
    gained = {**row, "extra": "", "head_dim": 64}
    theirs = {
        "name": "tutorial", "kernel": "forward", "arch": "sm_90", "head_dim": 128,
        "stack_bytes": 80, "loop": {"total": 8.0, "predicted": {"tflops": 653.0}},
    }  # fmt: skip
    return {
        "triton": "3.9.0", "environment": {"date": "2026-01-31"}, "others": [theirs],
        "rates": {"sm_90": {"device": "H100 SXM"}}, "rows": [row, gained],
    }  # fmt: skip


def test_profile_table_compares_full_blocks_of_calls_without_gain(tmp_path: Path) -> None:
    assert profile_table(tmp_path) == "Nothing has been counted yet.\n"
    document, path = counted(), tmp_path / "sm_90.json"
    path.write_text(json.dumps(document))
    first, _, _, _, *rows = profile_table(tmp_path).splitlines()
    assert first.startswith("sm_90, Triton 3.9.0, 2026-01-31. Instructions")
    assert "**predicted**" in first
    assert rows == [
        "| forward exp, D = 128 | 10.6 | 4.1 | 1.0 | 1.8 | 1.00 | 595 | "
        "8.0, 653, 80 B spilled (1.32) | – |"
    ]
    row = document["rows"][0]  # a causal call comes first
    document["rows"] += [{**row, "extra": "no gain", "loops": [{**row["loops"][0], "total": 9.9}]}]
    path.write_text(json.dumps(document))
    assert "| 9.9 |" in profile_table(tmp_path)


def test_every_claim_has_all_cells_and_a_known_verdict() -> None:
    claims = tomllib.loads(headlines.CLAIMS.read_text())["claim"]
    for claim in claims:
        assert set(claim) == {"source", "claim", "ours", "commands", "verdict", "evidence"}
        assert all(claim.values())
        assert all(claim["commands"])
        assert claim["verdict"] in headlines.VERDICTS
    page = (tables.ROOT / "docs" / "headlines.md").read_text()
    legend = {line.split("**")[1] for line in page.splitlines() if line.startswith("- **")}
    used = {claim["verdict"] for claim in claims}
    assert used <= legend


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Published results: two variants with three seeds, a file of tables, and times."""
    by_seed = {"softmax": (0.5, 0.6, 0.7), "ssmax": (0.81, 0.9, 0.99)}
    rows = [
        evals_rows.row(name, score, seed=seed)
        for name, scores in by_seed.items()
        for seed, score in enumerate(scores)
    ]
    publish.publish(
        evals_rows.written(tmp_path / "rows", rows), "python -m evals max-retrieval", tmp_path
    )
    table = Table("Ranks", ["mixture", "K=1", "K=2"], [["of two, fp32", "34", "582"]])
    (tmp_path / "ranks.csv").write_text(tables_csv([table]))
    spread = {"median": 0.02, "lower": 0.0125, "upper": 0.04, "count": 9}
    faster = {name: 1 / value for name, value in spread.items()}
    timed = [
        {"name": "z_loss", "ratios": {"softmax": spread}},
        {"algorithm": "two-pass", "speedup": faster | {"lower": 25.0, "upper": 80.0}},
    ]
    (tmp_path / "times.json").write_text(json.dumps({"rows": timed}))
    return tmp_path


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("max-retrieval; ssmax; 16", "90.0 ±22.4"),
        ("max-retrieval; ssmax; 16; accuracy_minus_softmax", "+30.0 ±2.5"),
        ("max-retrieval; softmax − ssmax; 16", "-30.0 ±2.5"),
        ("max-retrieval; ssmax; tests", "significantly better at n = 16"),
        ("max-retrieval; softmax; tests", "not significantly different at any length"),
        ("max-retrieval; command", "python -m evals max-retrieval"),
        ("ranks; of two, fp32; K=2", "582"),
        ("times; z_loss; softmax", "50.0 (25.0–80.0)"),
        ("times; two-pass", "50.0 (25.0–80.0)"),
    ],
)
def test_fields_of_claims_are_figures_of_results(field: str, text: str, stored: Path) -> None:
    assert headlines.filled(f"<{{{field}}}>", stored, stored) == f"<{text}>"


@pytest.mark.parametrize(
    "field", ["max-retrieval; entmax; 16", "max-retrieval; ssmax; 32", "ranks; one; K=1",
              "ranks; of two, fp32; K=3", "times; one", "needle; ssmax; 16"],
)  # fmt: skip
def test_a_field_without_a_result_is_an_error_with_its_name(field: str, stored: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"headlines.toml: no result for {{{field}}}: ")):
        headlines.filled(f"{{{field}}}", stored, stored)
