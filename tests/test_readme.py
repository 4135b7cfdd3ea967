"""What the README shows is true: its code runs, its commands and files exist, its table is new."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnzoo
from scripts import readme
from scripts.kernels_table import kernels_table

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def run(*args: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True)


def test_the_code_runs_in_order(tmp_path: Path) -> None:
    # In a process of its own, because it registers variants. A block that begins with its name is
    # a file: Triton reads the source of a kernel from one.
    files = {m[1]: b for b in BLOCKS if (m := re.match(r"# (\w+\.py)\n", b))}
    assert files
    for name, block in files.items():
        (tmp_path / name).write_text(block)
    code = [f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]"]
    code += [block for block in BLOCKS if block not in files.values()]
    assert len(code) >= 6
    done = run("-W", "error", "-c", "\n".join(code), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "{'s': (8,)}" in done.stdout


def test_the_first_example_has_five_lines_and_the_variant_fifteen() -> None:
    def lines(block: str) -> int:
        return sum(1 for line in block.splitlines() if line.strip() and line[0] != "#")

    assert lines(BLOCKS[0]) <= 5
    (own, _) = [block for block in BLOCKS if "register_variant(" in block]
    assert lines(own) <= 15


@pytest.mark.slow
def test_the_variant_of_ones_own_is_evaluated_by_the_command_that_is_shown(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.startswith("# shifted_relu.py\n")]
    (tmp_path / "shifted_relu.py").write_text(block)
    (command,) = re.findall(
        r"^python -m (evals all .*--plugin shifted_relu\.py)$", TEXT, re.MULTILINE
    )
    command = command.replace("shifted_relu.py", str(tmp_path / "shifted_relu.py"))
    few = ["--steps", "2", "--set", "test_sequences=4", "--set", "test_least=4", "--workers", "0"]
    few += ["--variants", "softmax,shifted_relu", "--out", str(tmp_path / "out")]
    done = run("-m", *command.split(), *few)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^shifted_relu\b.* \d+\.\d+", done.stdout, re.MULTILINE)) >= 8
    assert (tmp_path / "out" / "report.html").exists()


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT, flags=re.MULTILINE))
    assert {"eval", "test"} <= named <= targets


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(re.findall(r"python -m (\w+ [a-z-]+)", TEXT))))
def test_every_command_exists(command: str) -> None:
    done = run("-m", *command.split(), "--help")
    assert done.returncode == 0, done.stderr
    if command == "benchmarks attention":
        assert all(flag in done.stdout for flag in re.findall(r"--[a-z]+", own_sentence(command)))


def own_sentence(command: str) -> str:
    (line,) = [line for line in TEXT.splitlines() if f"`python -m {command}`" in line]
    return line


def test_every_file_exists() -> None:
    files = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert (ROOT / "attnzoo" / "variants").is_dir()
    assert (ROOT / "attnzoo" / "core" / "forms.py").is_file()


def test_the_table_is_up_to_date() -> None:
    assert readme.rendered(TEXT) == TEXT, "run `make readme`"


def test_every_variant_has_its_row() -> None:
    table = readme.variants_table().splitlines()
    assert [line.split("`")[1] for line in table[2:]] == attnzoo.list_variants()
    assert all(line.count(" | ") == 5 for line in table)


def test_text_around_the_table_is_kept() -> None:
    kernels = "c\n<!-- kernels: begin -->\n<!-- kernels: end -->\nd\n"
    evals = "".join(
        f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("tasks", "evals")
    )
    text = f"a\n<!-- variants: begin -->\nold\n<!-- variants: end -->\nb\n{evals}{kernels}"
    new = readme.rendered(text)
    assert new.startswith("a\n<!-- variants: begin -->\n| variant")
    assert "|\n<!-- variants: end -->\nb\n<!-- tasks: begin -->\n- `max-retrieval`" in new
    assert "<!-- evals: end -->\nc\n<!-- kernels: begin -->\n" in new
    assert new.endswith("\n<!-- kernels: end -->\nd\n")
    assert readme.rendered(new) == new
    with pytest.raises(ValueError, match="one pair"):
        readme.rendered("nothing here")


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


def test_the_readmes_table_is_made_from_results(tmp_path: Path) -> None:
    assert kernels_table(tmp_path) == "No GPU has been measured yet.\n"
    for name, document in {
        "b": results(date="2026-01-30", tflops=1.0),
        "a": results(),
        "c": results(device="Another"),
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    first, second = kernels_table(tmp_path).split("NVIDIA Test")
    assert first.startswith("Another, torch 2.11.0, Triton 3.6.0, 2026-01-31: TFLOP/s, causal,")
    lines = second.splitlines()
    assert "N = 16384, B = 4, H = 16" in lines[0]
    assert (
        lines[2]
        == "|  | forward, D = 64 | backward, D = 64 | forward, D = 128 | backward, D = 128 |"
    )
    assert lines[4] == "| `ssmax` | 410 (0.90, –) | – | – | – |"
    assert lines[5] == "| sdpa flash | 410 | – | – | – |"
