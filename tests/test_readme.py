"""What the README shows is true: its code runs, its commands and files exist, its table is new."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme

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
