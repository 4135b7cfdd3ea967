"""Evaluate a model with other attention variants on tasks of EleutherAI's lm-evaluation-harness.

Each variant is substituted at inference, without training, and evaluated as the harness's model hf
would be. All arguments that are not listed here are those of `lm_eval run`, such as --tasks,
--include_path, --num_fewshot, --limit, --batch_size, --device, --gen_kwargs, --model_args,
--metadata and --log_samples. --use_cache is an error.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pydantic import BaseModel

from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.files import check_writable
from commandline.table import Table
from evals.loggers import file_name
from evals.options import File, Names, add_fields, check_unique, option, read_options
from evals.pretrained.loading import Source, outline, read_text
from evals.pretrained.options import LAYERS, MODEL, Layers
from evals.pretrained.substitution import Substitution, check_substitution, parse_substitution
from evals.results.pretrained import BASELINE

NAME = "lm-eval"
MODEL_NAME = "attnzoo"  # among the models of the harness
Scores = Mapping[str, Mapping[str, Any]]  # by task, then by "metric,filter"


class HarnessOptions(BaseModel):
    """The options of the command."""

    model: str = MODEL
    variants: Names | None = option(
        None, "a,b(x=1)",
        "Substitute these variants, also with start='identity' or calibrate=N (default: evaluate "
        "the model as loaded)",
    )  # fmt: skip
    layers: Layers = LAYERS
    text: File | None = option(None, "FILE", "Calibrate on this UTF-8 text")
    out: File = option(
        Path("results") / NAME, "DIR", "Write the results of each variant to a folder in DIR"
    )


def add_parser(commands: Any) -> None:
    short = "Evaluate a model with other attention variants on tasks of lm-evaluation-harness"
    parser = commands.add_parser(NAME, help=short, description=__doc__)
    add_fields(parser, HarnessOptions)
    text = "The same as --out"
    parser.add_argument("-o", "--output_path", dest="out", metavar="DIR", help=text)
    add_plugin(parser)
    parser.set_defaults(further=[])


def main(line: argparse.Namespace) -> int:
    """Evaluate each variant, then print one table. Returns 0."""
    options = read_options(HarnessOptions, line)
    specs = _substitutions(options)
    command = _command()
    check_writable("--out", options.out)
    scores: dict[str, Scores] = {}
    for spec in specs or [None]:
        name = BASELINE if spec is None else str(spec)
        folder = options.out / file_name(name)
        arguments = {"pretrained": options.model}
        if spec is not None:
            arguments["variant"] = name
        if options.layers is not None:
            arguments["layers"] = ",".join(map(str, options.layers))
        if options.text is not None:
            arguments["text"] = str(options.text)
        words = ["--model", MODEL_NAME, "--model_args", json.dumps(arguments), *line.further]
        print(f"\n{name}", flush=True)
        earlier = set(folder.rglob("results_*.json"))
        # The harness has a function for its command only, which reads sys.argv.
        words = [NAME, "run", *words, "--output_path", str(folder)]
        with mock.patch.object(sys, "argv", words):
            command()
        # The next model is loaded after this one is gone.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if os.environ.get("RANK", "0") == "0":  # the other ranks of a run write no results
            files = set(folder.rglob("results_*.json")) - earlier
            if not files:
                raise UsageError(f"lm_eval wrote no results for {name}; see its messages above")
            (file,) = files
            scores[name] = json.loads(file.read_text())["results"]
    if scores:
        print(f"\n{table(scores).text()}")
    return 0


def _substitutions(options: HarnessOptions) -> list[Substitution]:
    """The variants, checked before the weights of the model are loaded."""
    specs = [parse_substitution(text, options.layers) for text in options.variants or ()]
    check_unique("--variants", list(map(str, specs)))
    if options.layers is not None and not specs:
        raise UsageError("--layers needs --variants")
    calibrated = any("calibrate" in spec.call.params for spec in specs)
    if calibrated != (options.text is not None):
        raise UsageError("--text and a variant with calibrate=N need each other")
    model = outline(Source(options.model))
    text = "" if options.text is None else read_text(options.text)
    for spec in specs:
        check_substitution(spec, model.model.config, model.tokens(text))
    return specs


def _command() -> Callable[[], None]:
    """The command of the harness, which then knows our model."""
    try:
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

        from evals.pretrained import harness_model  # noqa: F401
    except ImportError as error:
        raise UsageError(f'{NAME} needs pip install -e ".[lm-eval]" ({error})') from error
    return cli_evaluate


def table(scores: Mapping[str, Scores]) -> Table:
    """The metrics of each task by variant, with the standard errors of the harness."""
    rows = [
        [task, metric, *(_cell(of_tasks.get(task, {}), metric) for of_tasks in scores.values())]
        for task, metrics in next(iter(scores.values())).items()
        for metric in metrics
        if "," in metric and "_stderr," not in metric
    ]
    note = "± is the standard error as computed by the harness."
    return Table("lm-evaluation-harness", ["task", "metric,filter", *scores], rows, note)


def _cell(metrics: Mapping[str, Any], metric: str) -> str:
    value, error = metrics.get(metric), metrics.get(metric.replace(",", "_stderr,", 1))
    if value is None:
        return "—"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" + (f" ±{error:.4f}" if isinstance(error, float) else "")
