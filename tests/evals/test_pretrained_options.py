"""Wrong options of the commands that measure pretrained models."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.__main__ import parser
from evals.options import read_options, with_local_rank
from evals.pretrained.options import PretrainedOptions
from helpers.hf_models import quiet
from helpers.pretrained_runs import run
from helpers.small_lm import ROOT, TEXT

pytestmark = quiet
KNOWN = "--variants must be among adaptive_temperature, "
NO_FOLDER = f"must be a folder, got '{__file__}"
NO_LAYERS = "--layers must be all, or numbers such as 0-9,20, got"
WRONG = {
    "pretrained": {
        "--bfloat16 sums": "--bfloat16 must be among products, model, got 'sums'",
        "--bfloat16 model --dtype bfloat16": "--bfloat16 must be given with --dtype float32",
        "--variants softmaxx": KNOWN,
        "--variants softmax->ssmax": KNOWN,
        "--variants ssmax(x=1)": "'ssmax' has no parameter 'x'",
        "--variants entmax(start='identity')": "no parameters make 'entmax' equal",
        "--variants entmax(calibrate=8)": "'entmax' cannot be calibrated",
        "--variants ssmax(calibrate=1)": "calibrate must be an int >= 2, got 1",
        "--variants ssmax(calibrate=99999)": "calibrate must be at most 11",
        "--variants entmax(alpha=0.5)": "--variants entmax(alpha=0.5): entmax's alpha must be ",
        "--variants softmax,softmax": "--variants must not repeat an entry",
        "--layers 0,2": "layers must be from 0 to 1 for this model, got 2",
        "--layers 1-0": f"{NO_LAYERS} '1-0'",
        "--layers first": f"{NO_LAYERS} 'first'",
        "--layers 0-1,1": "--layers must name each layer once",
        "--measures los": "--measures must be among loss, retrieval, ",
        "--measures loss,loss": "--measures must not repeat an entry",
        "--measures loss --greedy": "--greedy needs the measure retrieval",
        "--lengths 64": "--lengths must be at least ",
        "--lengths 99999": "--text must have at least ",
        "--lengths 2048,2048": "--lengths must not repeat an entry",
        "--samples 1,2": "--samples must be one number or 1, one for each length, got 2",
        f"--out {__file__}": f"--out {NO_FOLDER}'",
        "--batch 0": "--batch must be >= 1, got '0'",
        "--workers -1": "--workers must be >= 0, got '-1'",
        "--shard 2/2": "--shard must be I/N",
        "--text nowhere": "--text must be a file, got 'nowhere'",
        "--gguf nowhere.gguf": "--gguf must be a file in ",
    },
    "adapt": {
        "--variants softmax": "softmax learns no parameter by itself",
        "--variants sink": "b has no gradient there, so training cannot move it",
        "--variants ssmax(learn='x')": "learn",
        "--variants ssmax(learn=1)": "learn must be names such as 'x y', got 1",
        "--variants softmaxx": KNOWN,
        "--variants ssmax,ssmax": "--variants must not repeat an entry",
        "--train-length 9500 --held-out 0.9": "--text must have at least 9501 tokens to train on",
        "--train-length 1": "--train-length must be >= 2, got '1'",
        "--lengths 9999": "--text must have at least ",
        "--held-out 1": "--held-out must be between 0 and 1, got 1.0",
        f"--held-out 0.5 --eval-text {TEXT}": "--held-out must not be given with",
        f"--eval-text {TEXT}": "--eval-text must be another text than --text",
        "--eval-text nowhere": "--eval-text must be a file, got 'nowhere'",
        "--text nowhere": "--text must be a file, got 'nowhere'",
        "--steps 0": "--steps must be >= 1, got '0'",
        "--learning-rate 0": "--learning-rate must be finite and > 0",
        "--learning-rate a": "--learning-rate must be a number, got 'a'",
        f"--save {__file__}": f"--save {NO_FOLDER}'",
        f"--out {__file__}": f"--out {NO_FOLDER}'",
        f"--save {__file__}/below": f"--save {NO_FOLDER}/below'",
        "--seeds 0,1 --save there": "--save needs one variant and one seed",
        "--seeds 1,1": "--seeds must not repeat an entry, got 1 twice",
        "--lora-learning-rate 0.1": "--lora-learning-rate needs --lora",
    },
    "sharpness": {
        "--variants softmaxx": KNOWN,
        "--variants softmax->ssmax": KNOWN,
        "--variants cosformer": "requires the parameter 'max_length'",
        "--lengths 16,2048": "must be from 2 to 1024",
        "--lengths 1": "--lengths entries must be >= 2",
        "--lengths 16,16": "--lengths must not repeat an entry, got 16 twice",
        "--variants softmax,softmax": "--variants must not repeat an entry",
        f"--out {__file__}": f"--out {NO_FOLDER}'",
        "--samples 0": "--samples must be >= 1, got '0'",
        "--text nowhere": "--text must be a file, got 'nowhere'",
        f"--model {ROOT / 'docs'}": f"--model {ROOT / 'docs'}",
    },
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [(command, *row) for command, rows in WRONG.items() for row in rows.items()],
)
def test_wrong_options_are_errors_and_write_nothing(
    command: str,
    options: str,
    message: str,
    small_lm: Path,
    without_weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but one come before the weights are loaded, which takes long."""
    folder = small_lm if "no gradient" in message else without_weights
    assert run(command, folder, tmp_path / "out", *options.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_under_torchrun_a_shard_uses_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    line = ["pretrained", "--model", "m", "--text", "t", "--shard", "env", "--device", "cuda"]
    options = with_local_rank(read_options(PretrainedOptions, parser().parse_args(line)))
    assert (options.shard.index, options.device, options.workers) == (3, "cuda:1", 1)
