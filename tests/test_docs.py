"""The code of README, CONTRIBUTING and docs/ runs; their commands, files and links exist.

New pages are found automatically.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

import attnzoo
import evals
from attnzoo import losses, nn
from attnzoo.integrations import transformers
from helpers.pages import (
    PAGES,
    README,
    Block,
    Command,
    anchors,
    bare_options,
    commands,
    links,
    make_targets,
    make_variables,
    name_of,
    outputs,
    python_blocks,
    text_of,
)
from helpers.processes import without_interpreter
from scripts import tables
from scripts.site import pages as variant_pages
from scripts.site.synonyms import SYNONYMS

ROOT = tables.ROOT
TEXTS = {path: text_of(path) for path in PAGES}
# The changelog may name commands and options that no longer exist.
CURRENT = [path for path in PAGES if path.name != "CHANGELOG.md"]
ALL_TEXT = "\n".join(TEXTS[path] for path in CURRENT)
MAKEFILE = (ROOT / "Makefile").read_text()
RECIPES_PAGE = ROOT / "docs" / "recipes.md"
# The texts of the recipes by their headings
RECIPES = dict(
    part.split("\n", 1) for part in re.split(r"^## ", TEXTS[RECIPES_PAGE], flags=re.MULTILINE)[1:]
)


# peft reads a name that transformers has deprecated.
OF_PEFT = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def run_blocks(blocks: list[Block], page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the blocks in order in a new process. Warnings are errors."""
    code = [f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]"]
    for block in blocks:
        if block.file is not None:  # Triton reads the source of a kernel from a file
            (folder / block.file).write_text(block.text)
        else:  # Blank lines before the code give tracebacks the line numbers of the page.
            text = "\n" * block.line + block.text
            code.append(f"exec(compile({text!r}, {page!r}, 'exec'))")
    # The pages show outputs without Triton's interpreter, which conftest.py turns on.
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", OF_PEFT, "-c", "\n".join(code)],
        cwd=folder, capture_output=True, text=True, env=without_interpreter(),
    )  # fmt: skip


def with_code() -> list[object]:
    """Return the pages whose code runs as one program: all with Python code but the recipes.

    All but README are marked slow: each is a new process.
    """
    return [
        pytest.param(path, id=name_of(path), marks=[] if path == README else [pytest.mark.slow])
        for path in PAGES
        if path != RECIPES_PAGE and python_blocks(TEXTS[path])
    ]


@pytest.mark.parametrize("path", with_code())
def test_code_runs_in_order(path: Path, tmp_path: Path) -> None:
    check_output(run_blocks(python_blocks(TEXTS[path]), name_of(path), tmp_path), TEXTS[path])


def check_output(done: subprocess.CompletedProcess[str], text: str) -> None:
    """Check that the code of the text ended well and printed what the text shows."""
    assert done.returncode == 0, done.stderr
    for shown in outputs(text):
        assert shown in done.stdout
    for block in python_blocks(text):
        for shown in re.findall(r"^print\(.*\)  # (.+)$", block.text, re.MULTILINE):
            assert shown in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_runs_alone(name: str, tmp_path: Path) -> None:
    """The commands of evals run in a test of their own."""
    text = RECIPES[name]
    check_output(run_blocks(python_blocks(text), f"recipe {name}", tmp_path), text)
    for program, words in re.findall(r"^(python|torchrun) (?!-m)(.+)$", text, re.MULTILINE):
        launcher = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        done = subprocess.run(
            [sys.executable, *launcher, *words.split()],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**without_interpreter(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if program == "torchrun":
            first, *_, last = (float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout))
            assert last < 0.9 * first


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_at_most_a_screen(name: str) -> None:
    blocks = python_blocks(RECIPES[name])
    assert blocks
    for block in blocks:
        code = [x for x in block.text.splitlines() if x and not x.startswith(("import", "from"))]
        assert len(code) <= 26


def test_recipes_begin_with_a_table_that_links_to_each() -> None:
    text = TEXTS[RECIPES_PAGE].split("\n## ")[0]
    listed = {link.removeprefix("#") for link in links(text)}
    assert listed == anchors("\n".join(f"## {name}" for name in RECIPES))


def test_code_of_variant_pages_runs() -> None:
    for name in attnzoo.list_variants():
        (block,) = python_blocks(variant_pages.page(name))
        exec(compile(block.text, f"page of {name}", "exec"), {"__name__": "__main__"})


def test_readme_is_short() -> None:
    assert len(TEXTS[README].splitlines()) <= 130


def test_first_example_of_readme_has_at_most_five_lines() -> None:
    first = python_blocks(TEXTS[README])[0].text
    assert sum(1 for line in first.splitlines() if line.strip() and line[0] != "#") <= 5


def evaluated() -> list[object]:
    """Return (page, command, file): evals commands with a plugin that the same page shows."""
    cases: list[object] = [
        pytest.param(path, words, file, id=f"{name_of(path)}-{file}")
        for path in CURRENT
        for words, file in re.findall(
            r"^python -m (evals (?!laws|ranks)[a-z-]+ .*--plugin (\w+\.py).*)$",
            TEXTS[path].replace("\\\n", ""),
            re.MULTILINE,
        )
    ]
    assert len(cases) >= 2  # your-own-variant.md and evals.md
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("path", "words", "file"), evaluated())
def test_evals_command_runs_with_the_plugin_file_on_the_same_page(
    path: Path, words: str, file: str, tmp_path: Path
) -> None:
    write_files(TEXTS[path], tmp_path)
    name = Path(file).stem
    few = "--steps 2 --set test_sequences=4 --set test_least=4 --workers 0".split()
    few += ["--out", str(tmp_path / "out")]
    of_variant = words.startswith("evals all")
    variants = f"softmax,{name}" if of_variant else "softmax"
    few += [] if "--variants" in words else ["--variants", variants]
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(words.replace(file, str(tmp_path / file))), *few],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        rf"^{name if of_variant else 'softmax'}\b.* \d+\.\d+", done.stdout, re.MULTILINE
    )
    assert len(rows) >= (8 if of_variant else 1)
    assert list((tmp_path / "out").rglob("report.html"))


def write_files(text: str, folder: Path) -> None:
    for block in python_blocks(text):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


@cache
def help_of(module: str, words: tuple[str, ...]) -> tuple[object, str]:
    """Run a command with --help and return its exit status and its output."""
    name = f"{module}.__main__" if (ROOT / module).is_dir() else module
    main = importlib.import_module(name).main
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main([*words, "--help"])
        except SystemExit as stop:
            return stop.code, printed.getvalue()
    return None, printed.getvalue()


def is_ours(module: str) -> bool:
    return (ROOT / module.split(".")[0]).is_dir()


COMMANDS = sorted(commands(ALL_TEXT), key=str)


@cache
def help_with_plugin(module: str, words: tuple[str, ...], plugin: str) -> tuple[object, str]:
    """`help_of` a command that a plugin on a page registers, in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(ALL_TEXT, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", module, *words, "--plugin", f"{folder}/{plugin}", "--help"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join((c.module, *c.words)))
def test_command_and_its_options_exist(command: Command) -> None:
    if not is_ours(command.module):
        assert importlib.util.find_spec(command.module) is not None
        return
    status, text = help_of(command.module, command.words)
    if status != 0 and command.plugin is not None:  # the plugin registers this command
        status, text = help_with_plugin(command.module, command.words, command.plugin)
    assert status == 0, text
    assert [option for option in command.options if option not in options_in(text)] == []


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", text))


@cache
def known_options() -> set[str]:
    texts = [help_of(c.module, c.words)[1] for c in COMMANDS if is_ours(c.module)]
    return set().union(*map(options_in, texts))


@pytest.mark.parametrize("path", CURRENT, ids=name_of)
def test_options_in_the_text_exist(path: Path) -> None:
    assert bare_options(TEXTS[path]) - known_options() == set()


@pytest.mark.parametrize("path", CURRENT, ids=name_of)
def test_make_targets_and_variables_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.MULTILINE))
    assert make_targets(TEXTS[path]) <= targets
    assert make_variables(TEXTS[path]) <= variables


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_and_files_exist(path: Path) -> None:
    for link in links(TEXTS[path]):
        file, _, anchor = link.partition("#")
        target = path if not file else (path.parent / file).resolve()
        generated = target.parent.name == "variants" and target.stem in attnzoo.list_variants()
        assert target.exists() or generated, f"{name_of(path)}: {link}"
        if anchor and target.suffix in (".md", ".ipynb") and not generated:
            assert anchor in anchors(text_of(target)), f"{name_of(path)}: {link}"


@pytest.mark.parametrize("path", list(tables.pages()), ids=name_of)
def test_generated_tables_are_up_to_date(path: Path) -> None:
    assert tables.rendered(path) == path.read_text(), "run `make tables`"


def test_every_generated_table_is_shown() -> None:
    shown = {match["name"] for text in TEXTS.values() for match in tables.BLOCK.finditer(text)}
    assert shown == set(tables.BLOCKS)


@pytest.mark.parametrize("page", SYNONYMS)
def test_headings_with_synonyms_exist(page: str) -> None:
    """Otherwise the site cannot be built."""
    lines = TEXTS[ROOT / "docs" / f"{page}.md"].splitlines()
    headings = {line.lstrip("#").strip() for line in lines if line.startswith("#")}
    assert not SYNONYMS[page].keys() - headings


def test_search_keeps_the_words_of_pages_that_are_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYNONYMS, "first", {"First": ("synonym",)})
    (tmp_path / "index.rst").write_text("Index\n=====\n\n.. toctree::\n\n   first\n   second\n")
    (tmp_path / "first.rst").write_text("First\n=====\n")
    settings = {"extensions": ["scripts.site.synonyms"], "html_theme": "basic"}
    for word in ("earlier", "later"):
        (tmp_path / "second.rst").write_text(f"Second\n======\n\n{word}\n")
        with docutils_namespace():
            site, trees = tmp_path / "html", tmp_path / "trees"
            Sphinx(tmp_path, None, site, trees, "html", settings, None, warningiserror=True).build()
        index = (site / "searchindex.js").read_text()
        assert f'"{word}":2' in index
        assert '"indexentries":{"synonym":[[0,"first",true]]}' in index


def test_every_page_is_in_the_contents() -> None:
    folder = ROOT / "docs"
    listed = set()
    for path in folder.rglob("*.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text(), re.M | re.S):
            names = [re.sub(r".*<(.+)>", r"\1", n) for n in tree.split("\n") if n and n[0] != ":"]
            listed |= {file for n in names for file in path.parent.glob(f"{n}.*")}
    assert {p for p in PAGES if p.is_relative_to(folder)} <= listed | {folder / "index.md"}


@pytest.mark.parametrize(
    ("module", "page"),
    [
        (attnzoo, "attention variants losses nn"),
        (losses, "losses"),
        (nn, "nn"),
        (transformers, "transformers"),
        (evals, "evals"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_public_name_is_in_the_reference(module: object, page: str) -> None:
    text = "\n".join((ROOT / "docs" / "api" / f"{name}.md").read_text() for name in page.split())
    described = set(re.findall(r"^\.\. (?:auto\w+|data|module):: (?:[\w.]+\.)?(\w+)", text, re.M))
    described |= set(re.findall(r"`evals\.(\w+)`", text))
    assert set(module.__all__) - described == set()  # pyright: ignore[reportAttributeAccessIssue]
