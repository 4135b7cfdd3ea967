"""Which families of transformers `convert` can convert, tried with tiny random models.

``python -m scripts.families`` tries every family of the installed version and writes
docs/results/families.json. ``python -m scripts.families llama t5`` prints the rows of some.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Iterator
from datetime import date
from typing import Any

import torch
import transformers
from torch import Tensor

from attnzoo.integrations.transformers import convert, revert
from scripts import tiny_models
from scripts.families_table import FIELDS, RESULTS, TOLERANCE

SECONDS, MEMORY = 60, 8 * 2**30  # of one model, of one process


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="directories of transformers/models")
    names = parser.parse_args(arguments).families
    every = tiny_models.families()
    if unknown := sorted(set(names) - set(every)):
        parser.error(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    rows = []
    for name in names or every:
        rows += (new := in_process(name))
        print(f"{name}: {', '.join(row['result'] for row in new)}", file=sys.stderr, flush=True)
    text = ",\n".join(json.dumps(row) for row in rows)
    if names:
        print(text)
        return
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    head = json.dumps({**versions, "date": str(date.today())})[:-1]
    RESULTS.write_text(f'{head}, "rows": [\n{text}\n]}}\n')


def in_process(family: str) -> list[dict[str, Any]]:
    """The rows of a family, from a process with limits of time and memory."""
    context = multiprocessing.get_context("fork")  # the child does not load torch again
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(family, sender))
    child.start()
    sender.close()
    rows: list[dict[str, Any]] = []
    try:
        while receiver.poll(SECONDS):
            rows.append(receiver.recv())
        problem = f"it takes more than {SECONDS} s"
    except EOFError:
        child.join()
        problem = "its process ended" if child.exitcode else ""
    if problem:
        child.kill()
        child.join()
        rows.append(row_of(family, "", "not tried", problem))
    return rows


def _send(family: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for row in trials(family):
        sender.send(row)
    sender.close()


def row_of(family: str, model: str, result: str, reason: str = "", **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(FIELDS), "family": family, "model": model, "result": result,
            "reason": reason, **more}  # fmt: skip


def trials(family: str) -> Iterator[dict[str, Any]]:
    """One row per class of configs of a family: its first model that runs."""
    try:
        classes = tiny_models.model_classes(family)
    except Exception as error:
        yield row_of(family, "", "not tried", described(error))
        return
    if not classes:
        yield row_of(family, "", "not tried", "no model of its own")
    for models in classes.values():
        first: dict[str, Any] | None = None
        for kind in models[:5]:
            row = trial(family, kind)
            first = first or row
            # A half of an encoder-decoder cannot be converted alone.
            if row["result"] != "not tried" and "must be a whole model" not in row["reason"]:
                first = row
                break
        assert first is not None
        if "must be a whole model" in first["reason"]:
            first = row_of(family, first["model"], "not tried", "a half of an encoder-decoder")
        yield first


def trial(family: str, kind: Any) -> dict[str, Any]:
    """Compares the outputs and gradients of a model before and after `convert`."""
    row = trial_with(family, kind)
    if row["result"] == "not tried" or "called none" in row["reason"]:
        infinite = "not finite" in row["reason"]
        # Hybrid models have few layers with attention.
        other = trial_with(family, kind, **({"redrawn": False} if infinite else {"layers": 8}))
        row = row if other["result"] == "not tried" else other
    return row


def trial_with(family: str, kind: Any, **options: Any) -> dict[str, Any]:
    name = kind.__name__
    try:
        model: Any = tiny_models.tiny_model(kind, **options)
    except Exception as error:
        return row_of(family, name, "not tried", f"config: {described(error)}")
    batch, before, problem = None, None, ""
    try:
        candidates = list(tiny_models.batches(model))
    except Exception as error:
        return row_of(family, name, "not tried", f"inputs: {described(error)}")
    for one in candidates:
        try:
            before = outputs_and_gradients(model, one)
        except Exception as error:
            problem = problem or described(error)
            continue
        batch = one
        break
    if batch is None or before is None:
        return row_of(family, name, "not tried", f"inputs: {problem}")
    if not all(x.isfinite().all() for part in before for x in part.values()):
        return row_of(family, name, "not tried", "its outputs or gradients are not finite")
    if max(errors(before, outputs_and_gradients(model, batch))) > TOLERANCE:
        return row_of(family, name, "not tried", "its outputs are random")
    variant, inputs = "softmax", " ".join(batch)
    try:
        try:
            convert(model, variant, inputs=batch)
        except ValueError as error:
            if "sinks" not in str(error):
                raise
            variant = "sink"  # takes the sinks; the other layers get sinks near -inf
            convert(model, variant, inputs=batch, start="identity")
    except Exception as error:
        other = " ".join(attention_classes(model))
        return row_of(
            family, name, "refused", described(error), inputs=inputs, other_attention=other
        )
    details: dict[str, Any] = {
        "variant": variant, "inputs": inputs, "other_attention": " ".join(attention_classes(model)),
        "converted": sum("attnzoo" in module._modules for module in model.modules()),
    }  # fmt: skip
    try:
        after = outputs_and_gradients(model, batch)
        compared = errors(before, after)
        if max(compared) > TOLERANCE and model._supports_sdpa:
            revert(model).set_attn_implementation("sdpa")
            sdpa = outputs_and_gradients(model, batch)
            if max(errors(sdpa, after)) <= TOLERANCE:
                compared = errors(sdpa, after)
                details["reason"] = (
                    "as the model's sdpa attention, from which its eager one differs"
                )
            else:
                details["reason"] = (
                    f"differs by {max(compared):.1e}; the model's own eager and sdpa attention "
                    f"differ by {max(errors(before, sdpa)):.1e}"
                )
    except Exception as error:
        return row_of(family, name, "differs", f"raises {described(error)}", **details)
    output, gradient = (float(f"{x:.1e}") if x < torch.inf else "infinite" for x in compared)
    return row_of(
        family, name, "equal" if max(compared) <= TOLERANCE else "differs", **details,
        output_error=output, gradient_error=gradient,
    )  # fmt: skip


def attention_classes(model: Any) -> list[str]:
    """The classes of attention modules that are not converted and hold no converted one."""
    names = {
        type(module).__name__
        for module in model.modules()
        if "Attention" in type(module).__name__
        and not any("attnzoo" in one._modules for one in module.modules())
        and not any("Attention" in type(one).__name__ for one in list(module.modules())[1:])
    }
    inside = {
        type(child).__name__
        for module in model.modules() if "attnzoo" in module._modules
        for child in module.modules()
    }  # fmt: skip
    return sorted(names - inside)


def outputs_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[dict[str, Tensor], ...]:
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
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if not name.endswith("attentions"):
                yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def errors(before: Any, after: Any) -> tuple[float, ...]:
    """The largest difference of outputs and of gradients, relative to the largest entry."""
    return tuple(difference(old, new) for old, new in zip(before, after, strict=True))


def difference(old: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    """The largest difference of tensors of the same name. A missing one is infinitely different."""
    if old.keys() - new.keys():
        return float("inf")
    largest = max((float(x.abs().max()) for x in old.values() if x.numel()), default=0.0)
    if largest == 0:
        return 0.0 if all(not x.any() for x in new.values()) else float("inf")
    worst = 0.0
    for name, x in old.items():
        if x.numel():
            worst = max(worst, float((x - new[name]).abs().nan_to_num(torch.inf).max()) / largest)
    return worst


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


if __name__ == "__main__":
    main()
