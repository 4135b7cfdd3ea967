"""The tile of each kernel: the tables, the choice between them, and measured tiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attnzoo import __main__ as command
from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import measured, tiles
from attnzoo.backends.triton.common.launch import is_safe
from attnzoo.backends.triton.flash.launch import config_of
from attnzoo.core import activations

GPU = "NVIDIA H100 80GB HBM3"
CONFIG = tiles.Config(64, 32, 4, 3)
LAYOUT = Layout(0.25, None, 0, None, None, None, None)
SOFTMAX = Rule(activations.EXP, "sum")


# ---- plain and safe calls -----------------------------------------------------------------------


def safe(
    layout: Layout = LAYOUT, rule: Rule = SOFTMAX, vectors: Vectors = Vectors(),  # noqa: B008
    terms: Terms = Terms(), q: torch.Tensor | None = None, kernel: str = "dq",  # noqa: B008
    dropout: Dropout = NO_DROPOUT,
) -> bool:  # fmt: skip
    if q is None:
        q = torch.empty(1, 2, 64, 32, dtype=torch.float16)
    return is_safe(kernel, q, layout, rule, vectors, terms, dropout)


VECTOR = torch.ones(1, 2, 64)
KEYS = torch.ones(1, 1, 1, 64, dtype=torch.uint8)
SEGMENTS = torch.zeros(1, 64, dtype=torch.int64)


@pytest.mark.parametrize(
    "term",
    [
        {"relative_bias": VECTOR}, {"mask": KEYS}, {"softcap": 50.0},
        {"q_segments": SEGMENTS, "k_segments": SEGMENTS},
    ],
)  # fmt: skip
def test_calls_with_at_most_one_term_are_plain_and_dkdv_has_none(term: dict[str, Any]) -> None:
    for left in (None, 8):
        layout = LAYOUT._replace(**term, left=left)
        assert not safe(layout)
        assert safe(layout, terms=Terms(key_bias=VECTOR))
        assert safe(layout, kernel="dkdv")
        assert not safe(LAYOUT._replace(left=left), kernel="dkdv")
        assert safe(layout, dropout=Dropout(torch.tensor(1), 0.1))


def test_other_calls_are_safe() -> None:
    assert not safe(vectors=Vectors(gain=VECTOR, offset=VECTOR, sink=VECTOR))
    assert safe(LAYOUT._replace(mask=torch.ones(1, 1, 64, 64, dtype=torch.uint8)))
    assert safe(terms=Terms(decay=VECTOR[..., 0]))
    assert safe(terms=Terms(factor=VECTOR))
    assert safe(vectors=Vectors(shape=VECTOR))
    assert safe(rule=Rule(activations.SOFTPICK, "sum"))
    q = torch.empty(1, 2, 64, 32, dtype=torch.bfloat16)
    for phi in (activations.EXP, activations.RELU2, activations.SOFTPLUS):
        assert not safe(rule=Rule(phi, "sum"), q=q)
        exponential = phi is activations.SOFTPLUS
        assert safe(rule=Rule(phi, "sum"), q=q, kernel="dkdv") == exponential
    for normalize, dtype in product(("none", "sum", "threshold"), (torch.float16, torch.bfloat16)):
        q = torch.empty(1, 2, 64, 32, dtype=dtype)
        rule = Rule(activations.SPARSEMAX, normalize)
        assert safe(rule=rule, q=q) == (dtype == torch.float16)
        mapped = normalize == "threshold"
        assert safe(rule=rule, q=q, kernel="dkdv") == (mapped or dtype == torch.float16)


# ---- the tables ---------------------------------------------------------------------------------


def test_head_dimensions_have_the_tile_of_their_class() -> None:
    for dim, limit in ((1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)):
        for safe in (False, True):
            tile = tiles.tile_of_table("dq", 90, 16, dim, safe)
            assert tile == tiles.tile_of_table("dq", 90, 16, limit, safe)
    with pytest.raises(ValueError, match="head dimension must be at most 256, got 257"):
        tiles.tile_of_table("dq", 90, 16, 257, False)


def test_other_architectures_use_the_tiles_of_a_known_one() -> None:
    for arch, known in ((75, 80), (86, 80), (89, 80), (90, 90), (103, 100), (120, 80)):
        for kernel, dim in product(("forward", "dq", "dkdv"), tiles.LIMITS):
            tile = tiles.tile_of_table(kernel, arch, 16, dim, False)
            assert tile == tiles.tile_of_table(kernel, known, 16, dim, False)


def test_the_solver_has_the_tile_of_the_block_map_on_all_architectures() -> None:
    every = product((80, 90, 100), (16, 32), tiles.LIMITS, (False, True))
    for arch, bits, dim, safe in every:
        tile = tiles.tile_of_table("threshold", arch, bits, dim, safe)
        assert tile[:2] == tiles.map_tile(dim, bits)


@pytest.mark.parametrize("bits", [16, 32])
def test_chunks_of_linear_forms_are_equally_long_on_all_architectures(bits: int) -> None:
    """Fake functions compute the number of chunks without a GPU."""
    assert len({tiles.linear_tile(arch, bits).block_m for arch in (80, 86, 90, 100, 120)}) == 1


# ---- measured tiles -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *device: GPU)
    measured.read.cache_clear()
    yield tmp_path / "attnzoo"
    measured.read.cache_clear()


def tile(kernel: str = "dq", bits: int = 16, dim: int = 96, safe: bool = False) -> tiles.Config:
    return measured.tile_of_kernel(kernel, 90, bits, dim, safe, torch.device("cuda"))


def test_measured_tiles_come_before_those_of_the_tables(folder: Path) -> None:
    file = measured.user_file(GPU)
    assert file.parent == folder
    measured.write(file, GPU, {("dq", 16, 128): CONFIG})
    assert tile() == CONFIG
    for other in ({"kernel": "dkdv"}, {"bits": 32}, {"dim": 64}, {"safe": True}):
        call = {"kernel": "dq", "bits": 16, "dim": 96, "safe": False, **other}
        expected = tiles.tile_of_table(call["kernel"], 90, call["bits"], call["dim"], call["safe"])
        assert tile(**call) == expected != CONFIG
    on_cpu = measured.tile_of_kernel("dq", 90, 16, 96, False, torch.device("cpu"))
    assert on_cpu == tiles.tile_of_table("dq", 90, 16, 96, False)


def test_files_are_read_once_and_the_user_s_before_the_shipped_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "SHIPPED", folder / "shipped")
    shipped, users = folder / "shipped" / measured.file_name(GPU), measured.user_file(GPU)
    for stages, file in ((3, shipped), (4, users)):
        before = tile()
        measured.write(file, GPU, {("dq", 16, 128): CONFIG._replace(stages=stages)})
        assert tile() == before, "files are read once"
        measured.read.cache_clear()
        assert tile().stages == stages
        assert measured.read(GPU)[0][-1] == file
    measured.write(users, GPU, {("dkdv", 16, 128): CONFIG})
    measured.read.cache_clear()
    assert (tile().stages, tile("dkdv")) == (3, CONFIG)


def test_a_user_without_a_readable_folder_has_the_tiles_of_the_tables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiles.tile_of_table("dq", 90, 16, 96, False)
    folder.write_text("a file")  # stands for any error of the system
    assert tile() == expected
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", dict[int, Any]().__getitem__)  # no home folder
    measured.read.cache_clear()
    assert tile() == expected


def test_measured_tiles_are_not_used_with_a_block_map(folder: Path) -> None:
    """Blocks of the map may be larger than those that were measured, and not fit in memory."""
    measured.write(measured.user_file(GPU), GPU, {("dq", 16, 128): CONFIG, ("dq", 16, 64): CONFIG})
    q = torch.empty(1, 2, 64, 96, dtype=torch.bfloat16, device="meta")
    call = q, q, LAYOUT, Rule(activations.SPARSEMAX, "threshold"), Vectors(), Terms()
    table = tiles.tile_of_table("dq", 90, 16, 96, False)
    assert config_of("dq", 90, *call, (128, 64)).stages == table.stages != CONFIG.stages


@pytest.mark.parametrize("name", ["device", "triton"])
def test_a_file_for_another_gpu_or_triton_is_not_used(folder: Path, name: str) -> None:
    file = measured.user_file(GPU)
    measured.write(file, GPU, {("dq", 16, 128): CONFIG})
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, name: "other"}))
    assert tile() == tiles.tile_of_table("dq", 90, 16, 96, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kernel": "encode"}, {"bits": 8}, {"head_dim": 96}, {"block_m": 48}, {"block_n": "64"},
        {"warps": 3}, {"warps": 4.0}, {"stages": 0}, {"kernel": "decode", "block_n": 256},
        {"registers": 300}, {"part": 8}, {"transposed": "no"},
        {"speed": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_file_is_an_error_that_names_it(folder: Path, wrong: dict[str, Any]) -> None:
    file = measured.user_file(GPU)
    measured.write(file, GPU, {("dq", 16, 128): CONFIG, ("forward", 16, 128): CONFIG})
    document = json.loads(file.read_text())
    document["tiles"][1] |= wrong
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"{file.name} must hold tiles"):
        tile()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"device": 1}', "\x00"])
def test_a_file_that_is_no_table_is_an_error_that_names_it(folder: Path, text: str) -> None:
    folder.mkdir()
    measured.user_file(GPU).write_text(text)
    with pytest.raises(ValueError, match="must hold tiles as `python -m benchmarks tune"):
        tile()


def test_the_command_prints_where_measured_tiles_are_looked_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([])
    assert f"measured tiles: {folder}, read only with a GPU" in capsys.readouterr().out
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(command, "backends", lambda device, dtype: [])
    command.main([])
    file = measured.user_file(GPU)
    assert f"measured tiles of {GPU}: 0, from no file {file}\n" in capsys.readouterr().out
    measured.write(file, GPU, {("dq", 16, 128): CONFIG})
    measured.read.cache_clear()
    command.main([])
    assert f"measured tiles of {GPU}: 1, from {file}\n" in capsys.readouterr().out
