"""Plugins are loaded once, under their own name, from any folder; all commands accept them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnzoo
from attnzoo.core import plugins, registry
from benchmarks.__main__ import main as benchmarks
from helpers.processes import without_interpreter

ROOT = Path(__file__).parents[2]
SMALL = ["--heads", "2", "--head-dim", "16", "--repeats", "2", "--min-seconds", "0.001"]


def evals(line: list[str]) -> int:
    for package in ("matplotlib", "pydantic"):
        pytest.importorskip(package, reason=f"the evals need {package}")
    from evals.__main__ import main

    return main(line)


def example(name: str) -> str:
    """Return the code block of the README or the documentation that starts with `# <name>`."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))


@pytest.fixture(autouse=True)
def unload(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the modules and variants that a test loads."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    monkeypatch.setattr(plugins, "_LOADED", {})
    before = set(sys.modules)
    yield
    for name in set(plugins._LOADED) - before:
        sys.modules.pop(name, None)


@pytest.fixture
def cube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the cube.py of the documentation to a folder outside sys.path and return its path."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "theirs" / "cube.py").write_text(example("cube.py"))
    return str(Path("..") / "theirs" / "cube.py")


# ---- loading ----------------------------------------------------------------------------------


def test_plugin_is_imported_once_under_its_own_name(cube: str) -> None:
    plugin = attnzoo.load_plugin(cube)
    assert plugin.variants == ("cube",)
    assert sys.modules["cube"] is plugin.module
    assert attnzoo.load_plugin(Path(cube).resolve()) is plugin


def test_failed_load_leaves_no_variant(cube: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file can be corrected. Variants of plugins and modules that it has loaded stay."""
    file = Path(cube).resolve().with_name("broken.py")
    register = "attnzoo.register_variant(attnzoo.Variant('{}', '-', '-', lambda q, k, call: q))\n"
    file.with_name("imported.py").write_text("import attnzoo\n" + register.format("stays"))
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "imported", raising=False)
    file.write_text(
        f"import attnzoo, imported\nattnzoo.load_plugin({cube!r})\n"
        "attnzoo.register_variant(attnzoo.Variant('half', '-', '-', lambda q, k, call: q))\n1 / 0"
    )
    with pytest.raises(ValueError, match="raised ZeroDivisionError"):
        attnzoo.load_plugin(file)
    assert "half" not in attnzoo.list_variants()
    assert {"cube", "stays"} <= {*attnzoo.list_variants()}
    file.write_text(file.read_text().removesuffix("1 / 0"))
    assert attnzoo.load_plugin(file).variants == ("half",)


def test_second_file_of_the_same_name_raises(cube: str, tmp_path: Path) -> None:
    attnzoo.load_plugin(cube)
    (tmp_path / "here" / "cube.py").write_text("")
    with pytest.raises(ValueError, match=r"free module name, 'cube' is taken by .*theirs.cube\.py"):
        attnzoo.load_plugin("cube.py")


def test_path_of_a_wrong_type_raises() -> None:
    with pytest.raises(TypeError, match="path must be that of a Python file, got None"):
        attnzoo.load_plugin(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["statistics", "sys", "einops", "colorsys"])
def test_name_of_an_installed_module_raises(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("raise SystemError('executed')")
    with pytest.raises(ValueError, match=f"free module name, '{name}' is taken by"):
        attnzoo.load_plugin(file)


def test_file_imported_before_load_plugin_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_before.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_before")
    with pytest.raises(ValueError, match="must not be imported before load_plugin"):
        attnzoo.load_plugin(tmp_path / "imported_before.py")
    del sys.modules["imported_before"]
    assert attnzoo.load_plugin(tmp_path / "imported_before.py").variants == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raises.py", "1 / 0", "raises.py raised ZeroDivisionError: division by zero"),
        ("leaves.py", "import sys; sys.exit(3)", r"leaves.py called sys.exit\(3\)"),
        ("no-module.py", "", "file name that is a module name"),
        ("lambda.py", "", "file name that is a module name"),
        ("text.txt", "", "must be a Python file"),
        ("missing.py", None, "must be a Python file"),
    ],
)
def test_failed_load_raises_and_leaves_no_module(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        attnzoo.load_plugin(file)
    assert file.stem not in sys.modules
    file.write_text("")
    if name == "leaves.py":
        assert attnzoo.load_plugin(file).variants == ()


# ---- commands ---------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("command", ["attention", "decode"])
def test_benchmarks_run_the_kernel_of_a_plugin(
    command: str, cube: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [command, "--device", "cpu", "--plugin", cube, "--variants", "cube", "--lengths", "32"]
    line += ["--threads", "1", *SMALL]
    options = {
        "attention": ["--backend", "flash", "--no-memory", "--baselines", ""],
        "decode": ["--backend", "decode", "--kv-heads", "2"],
    }
    assert benchmarks([*line, *options[command]]) == 0
    printed = capsys.readouterr()
    (row,) = [text for text in printed.out.splitlines() if " cube " in text]
    assert re.search(r"out \d\.\de-\d+ \(0\.\d+\)", row), "error above its budget"
    assert all(text.startswith(f"{command}, N = 32: ") for text in printed.err.splitlines())


LINEAR = """
import attnzoo

def features(x, positions):
    return x.sigmoid()

def weights(q, k, call):
    w = ((call.scale * q).sigmoid() @ k.sigmoid().mT).masked_fill(~call.visible, 0.0)
    return w / w.sum(-1, keepdim=True)

form = attnzoo.Linear(features, lambda dim: dim)
attnzoo.register_variant(attnzoo.Variant("soft_linear", "σ(q)·σ(k) / Σ", "-", weights,
                                         forms=lambda call: (form,)))
"""


def test_benchmarks_linear_runs_the_linear_variant_of_a_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "soft_linear.py"
    file.write_text(LINEAR)
    line = ["linear", "--device", "cpu", "--plugin", str(file), "--lengths", "32", *SMALL]
    assert benchmarks([*line, "--threads", "1", "--direction", "forward"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"forward +soft_linear +linear +(out|d[qkv]) ", text)
    assert re.search(r"soft_linear, forward: (not )?faster than soft_linear, pairwise", text)
    assert benchmarks([*line, "--variants", "softmax"]) == 2
    assert (
        "--variants must list variants with a linear form, got softmax" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_laws_and_ranks_accept_a_plugin(
    cube: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.theory.laws.LAWS", ())
    monkeypatch.setattr("evals.theory.laws.LENGTHS", (16, 64))
    assert evals(["laws", "--plugin", cube]) == 0
    assert "cube" in capsys.readouterr().out
    seen = []
    monkeypatch.setattr(
        "evals.theory.ranks.main", lambda *_, **__: seen.append(attnzoo.list_variants()) or 0
    )
    assert evals(["ranks", "--plugin", cube]) == 0
    assert "cube" in seen[0]


@pytest.mark.parametrize(
    "command", ["max-retrieval", "laws", "ranks", "in-context", "report", "sharpness"]
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(3)", " called sys.exit(3)"),
        ("1 / 0", " raised ZeroDivisionError: division by zero"),
        ("", " registered no variant and no task"),
    ],
)
def test_evals_report_a_wrong_plugin_in_one_line(
    text: str, message: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    more = {"report": [str(tmp_path)], "sharpness": ["--model", "m", "--text", str(file)]}
    out = [] if command == "report" else ["--out", str(tmp_path / "out")]
    assert evals([command, *more.get(command, []), *out, "--plugin", str(file)]) == 2
    assert capsys.readouterr().err == f"error: --plugin {file}{message}\n"


@pytest.mark.parametrize(
    "command", ["attention", "linear", "decode", "compile", "tune --kernel dq"]
)
def test_benchmarks_reject_a_plugin_without_a_variant(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "empty.py"
    file.write_text("")
    assert benchmarks([*command.split(), "--plugin", str(file)]) == 2
    assert f"--plugin {file} registered no variant" in capsys.readouterr().err


def command_line(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with kernels compiled and not interpreted."""
    env = without_interpreter() | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, env=env
    )


@pytest.mark.slow
def test_kernels_of_a_plugin_compile_and_tune(cube: str) -> None:
    small = ["--plugin", cube, "--jobs", "1"]
    done = command_line(
        ".", "benchmarks", "compile", "--arch", "sm_90", "--head-dims", "64", "--kernels",
        "forward,decode", *small,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [text.split()[:3] for text in done.stdout.splitlines() if " sm_90 " in text]
    assert rows == [["forward", "cube", "D=64"], ["decode", "cube", "D=64"]]
    few = ["--blocks", "64", "--warps", "4", "--stages", "1", "--head-dim", "64"]
    done = command_line(
        ".", "benchmarks", "tune", "--kernel", "forward", "--activation", "cube", *few, *small
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Config(64, 64, 4, 1)" in done.stdout


@pytest.mark.slow
def test_plugin_runs_in_worker_processes(cube: str, tmp_path: Path) -> None:
    small = ["--variants", "cube", "--seeds", "1", "--steps", "2", "--lengths", "16"]
    done = command_line(
        ".", "evals", "needle", "--preset", "smoke", "--plugin", cube, *small, "--workers", "1",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^cube.* \d+\.\d+", done.stdout, re.MULTILINE)
    done = command_line(
        ".", "benchmarks", "attention", "--plugin", cube, "--variants", "cube", "--lengths", "64",
        "--no-time", "--baselines", "", "--threads", "1", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"64 .* cube .* \d+$", done.stdout, re.MULTILINE), "no memory figure"
