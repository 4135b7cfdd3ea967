"""Which families of transformers `convert` can convert, tried with tiny random models.

``python -m scripts.families`` tries every family of the installed version and writes
docs/results/families.json. ``python -m scripts.families llama t5`` prints the rows of some.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Iterator
from datetime import date
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import transformers
from torch import Tensor

from attnzoo.integrations.transformers import convert, revert
from scripts import tiny_models
from scripts.families_table import FIELDS, RESULTS, TOLERANCE

SECONDS, MEMORY = 60, 8 * 2**30  # of one class of configs, of one process
HALF = "must be a whole model"  # a half of an encoder-decoder cannot be converted alone

Row = dict[str, Any]
Outcome = tuple[dict[str, Tensor], dict[str, Tensor]]  # outputs and gradients by name


class NotTried(Exception):
    """No tiny model could be made, or none that runs."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="directories of transformers/models")
    names = parser.parse_args(arguments).families
    every = tiny_models.families()
    if unknown := sorted(set(names) - set(every)):
        parser.error(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for name in names or every:
        rows += (new := family_rows(name))
        print(f"{name}: {', '.join(row['result'] for row in new)}", file=sys.stderr, flush=True)
    text = ",\n".join(json.dumps(row) for row in rows)
    if names:
        print(text)
        return
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    head = json.dumps({**versions, "date": str(date.today())})[:-1]
    RESULTS.write_text(f'{head}, "rows": [\n{text}\n]}}\n')


def family_rows(family: str) -> list[Row]:
    """One row per class of configs, from a process with limits of time and memory."""
    rows: list[Row] = []
    try:
        classes = tiny_models.model_classes(family)
        # A forked process does not load torch again.
        with multiprocessing.get_context("fork").Pool(1, limit) as pool:
            trials = pool.imap(partial(trial, family), classes.values())
            for _ in classes:
                rows.append(trials.next(SECONDS))
    except Exception as error:
        rows.append(row_of(family, reason=described(error)))
    return rows or [row_of(family, reason="no model of its own")]


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)


def row_of(family: str, model: str = "", reason: str = "") -> Row:
    values = (family, model, "not tried", reason)
    return dict(zip_longest(FIELDS, values))


def trial(family: str, models: list[type]) -> Row:
    """The row of the first model that runs, of those with one class of configs."""
    rows: list[Row] = []
    for model in models[:5]:
        rows.append(row := trial_of(family, model))
        if row["result"] != "not tried" and HALF not in row["reason"]:
            return row
    if HALF in rows[0]["reason"]:
        return row_of(family, rows[0]["model"], "a half of an encoder-decoder")
    return rows[0]


def trial_of(family: str, kind: type) -> Row:
    """Compares the outputs and gradients of a model before and after `convert`."""
    row = trial_with(family, kind)
    if row["result"] == "not tried" or "called none" in row["reason"]:
        # Hybrid models have few layers with attention.
        options = {"redrawn": False} if "not finite" in row["reason"] else {"layers": 8}
        other = trial_with(family, kind, **options)
        row = row if other["result"] == "not tried" else other
    return row


def trial_with(family: str, kind: type, **options: Any) -> Row:
    row = row_of(family, kind.__name__)
    try:
        model, batch, before = running(kind, **options)
    except NotTried as error:
        return row | {"reason": str(error)}
    row["inputs"] = " ".join(batch)
    try:
        row["variant"] = converted(model, batch)
    except Exception as error:
        row |= {"result": "refused", "reason": described(error)}
    row["other_attention"] = " ".join(attention_classes(model))
    if row["result"] == "refused":
        return row
    row["converted"] = sum("attnzoo" in module._modules for module in model.modules())
    try:
        after = outputs_and_gradients(model, batch)
        compared = errors(before, after)
        if max(compared) > TOLERANCE and model._supports_sdpa:
            revert(model).set_attn_implementation("sdpa")
            sdpa = outputs_and_gradients(model, batch)
            if max(errors(sdpa, after)) <= TOLERANCE:
                compared = errors(sdpa, after)
                row["reason"] = "as the model's sdpa attention, from which its eager one differs"
            else:
                row["reason"] = (
                    f"differs by {max(compared):.1e}; the model's own eager and sdpa attention "
                    f"differ by {max(errors(before, sdpa)):.1e}"
                )
    except Exception as error:
        return row | {"result": "differs", "reason": f"raises {described(error)}"}
    row["result"] = "equal" if max(compared) <= TOLERANCE else "differs"
    rounded = [float(f"{x:.1e}") if x < torch.inf else "infinite" for x in compared]
    return row | dict(zip(("output_error", "gradient_error"), rounded))


def running(kind: type, **options: Any) -> tuple[Any, dict[str, Any], Outcome]:
    """A tiny model, inputs with which it runs, and its outputs and gradients."""
    with stage("config"):
        model: Any = tiny_models.tiny_model(kind, **options)
    with stage("inputs"):
        problem = None
        for batch in list(tiny_models.batches(model)):
            try:
                before = outputs_and_gradients(model, batch)
                break
            except Exception as error:
                problem = problem or error
        else:
            raise problem or NotTried("none")
    if not all(x.isfinite().all() for part in before for x in part.values()):
        raise NotTried("its outputs or gradients are not finite")
    if max(errors(before, outputs_and_gradients(model, batch))) > TOLERANCE:
        raise NotTried("its outputs are random")
    return model, batch, before


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise NotTried(f"{name}: {described(error)}") from error


def converted(model: Any, batch: dict[str, Any]) -> str:
    """Convert the model and return the variant."""
    try:
        convert(model, "softmax", inputs=batch)
        return "softmax"
    except ValueError as error:
        if "sinks" not in str(error):
            raise
    # It takes the sinks; the other layers get sinks near -inf.
    convert(model, "sink", inputs=batch, start="identity")
    return "sink"


def attention_classes(model: Any) -> list[str]:
    """The classes of attention modules that are not converted and hold no converted one."""
    names, inside = set[str](), set[str]()
    for module in model.modules():
        classes = [type(part).__name__ for part in module.modules()]
        if "attnzoo" in module._modules:
            inside.update(classes[1:])
        attention = ["Attention" in name for name in classes]
        holds = any("attnzoo" in part._modules for part in module.modules())
        if attention[0] and sum(attention) == 1 and not holds:
            names.add(classes[0])
    return sorted(names - inside)


def outputs_and_gradients(model: Any, batch: dict[str, Any]) -> Outcome:
    """All floating outputs, and the gradients of all parameters of a fixed sum of them.

    Outputs at tokens that the attention mask hides have no meaning and do not count.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    outputs = {str(i): x for i, x in enumerate(tensors(model(**batch)))}
    if (mask := batch.get("attention_mask")) is not None:
        for name, x in outputs.items():
            if x.shape[:2] == mask.shape:
                outputs[name] = x * mask.view(*mask.shape, *[1] * (x.dim() - 2))
    torch.manual_seed(3)
    terms = [(x * torch.randn_like(x)).sum() for x in outputs.values() if x.requires_grad]
    torch.stack(terms).sum().backward()
    named = model.named_parameters()
    gradients = {name: x.grad.clone() for name, x in named if x.grad is not None}
    return {name: x.detach() for name, x in outputs.items()}, gradients


def tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in an output. Caches and attention weights do not count."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    if isinstance(value, dict):
        value = [one for name, one in value.items() if not name.endswith("attentions")]
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def errors(before: Outcome, after: Outcome) -> list[float]:
    """The largest difference of outputs and of gradients, relative to the largest entry.

    A missing tensor is infinitely different.
    """
    return [difference(old, new) for old, new in zip(before, after, strict=True)]


def difference(old: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    if old.keys() - new.keys():
        return torch.inf
    x, y = (torch.cat([part[name].flatten() for name in old]) for part in (old, new))
    largest, difference = (value.abs().nan_to_num(torch.inf).max().double() for value in (x, x - y))
    return float(difference / largest) if difference > 0 else 0.0


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


if __name__ == "__main__":
    main()
