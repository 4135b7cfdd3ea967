"""The wheel, the pinned versions, optional packages, and the environment that `make` creates."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import attnzoo
from attnzoo import __main__ as command

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pinned = [line.split(";")[0].split("==") for line in lines if line and line[0] != "#"]
    return {canonical(name): version.strip() for name, version in pinned}


def requirements() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(entry for extra in extras for entry in extra)]


def test_the_version_is_the_same_everywhere() -> None:
    assert attnzoo.__version__ == PROJECT["version"]
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_wheel_contains_only_attnzoo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    info = f"attnzoo-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in files} == {"attnzoo", info}
    assert "attnzoo/py.typed" in files
    assert f"{info}/licenses/LICENSE" in files
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "attnzoo").rglob("*.py")}
    assert sources <= set(files)


def test_all_dependencies_are_pinned() -> None:
    names = {canonical(re.split(r"[\[<>=!~; ]", entry)[0]) for entry in requirements()}
    assert names <= pins().keys()
    assert pins()["torch"] == "2.13.0"


def test_the_extra_for_transformers_has_what_its_trainer_needs() -> None:
    """Transformers lists it in its extra "torch"."""
    entries = importlib.metadata.requires("transformers") or []
    needed = {re.split(r"[\[<>=!~; ]", x)[0] for x in entries if 'extra == "torch"' in x}
    extra = PROJECT["optional-dependencies"]["hf"]
    assert "accelerate" in needed
    assert needed - {"torch"} <= {re.split(r"[<>=]", x)[0] for x in extra}


@pytest.mark.parametrize("name", ["torch", "triton", "transformers"])
def test_the_oldest_tested_version_is_the_oldest_required_one(name: str) -> None:
    lower = {entry.split(">=")[1] for entry in requirements() if entry.startswith(f"{name}>=")}
    assert [f"{version}.0" for version in lower] == [pins("constraints-oldest.txt")[name]]


def test_library_depends_on_torch_einops_and_numpy_only() -> None:
    names = {re.split(r"[<>=]", entry)[0] for entry in PROJECT["dependencies"]}
    assert names == {"torch", "einops", "numpy"}


@pytest.mark.parametrize(("installed", "created"), [(False, True), (True, False)])
def test_make_recreates_an_incomplete_venv(tmp_path: Path, installed: bool, created: bool) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    if installed:
        (tmp_path / ".venv" / ".installed").touch()
    plan = subprocess.run(
        ["make", "-n", "test"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert ("-m venv" in plan) is created
    assert "-m pytest" in plan


def test_generated_folders_are_ignored_by_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".venv/", "/results/", "__pycache__/", ".pytest_cache/", ".ruff_cache/"} <= set(ignored)


@pytest.mark.slow
def test_import_without_transformers_or_with_an_old_version_raises() -> None:
    code = (
        "import importlib.metadata, importlib.util, sys, attnzoo\n"
        "def attempt():\n"
        "    try: import attnzoo.integrations.transformers\n"
        "    except ImportError as error: print(error)\n"
        "version = importlib.metadata.version\n"
        "for old in '4.57.1', '5.16.1':\n"
        "    importlib.metadata.version = lambda name: old\n"
        "    attempt()\n"
        "importlib.metadata.version = version\n"
        "sys.modules['transformers'] = None; importlib.util.find_spec = lambda n, *a: None\n"
        "attempt()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    *old, without = done.stdout.strip().splitlines()
    oldest = pins("constraints-oldest.txt")["transformers"].removesuffix(".0")
    for line, version in zip(old, ("4.57.1", "5.16.1"), strict=True):
        assert f"transformers {oldest} or later, got {version}" in line, done.stderr
    assert "run pip install -e '.[hf]' in the clone of attnzoo" in without, done.stderr


def test_the_command_prints_versions_backends_and_docs(capsys: pytest.CaptureFixture[str]) -> None:
    command.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"attnzoo {attnzoo.__version__}, torch {torch.__version__}, ")
    assert lines[-1] == f"docs: {ROOT / 'docs'}"
    listed = dict(line.strip().split(": ") for line in lines if line.startswith("  "))
    names = [name for text in listed.values() for name in text.split(", ")]
    assert sorted(names) == attnzoo.list_variants()
    q = torch.empty(command.SHAPE, requires_grad=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    q = q.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    plan = attnzoo.explain(q, q, q, "entmax", is_causal=True)
    assert "entmax" in listed[str(plan.chosen)].split(", ")


def test_the_command_without_docs_and_optional_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(command, "PACKAGES", ("no-such-package",))
    command.main([])
    shown = capsys.readouterr().out
    assert "no no-such-package\n" in shown
    assert shown.endswith("docs: in the folder docs of the repository\n")
