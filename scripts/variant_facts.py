"""Facts about a variant as text for tables and pages: forms, cost, formula, docstring."""

from __future__ import annotations

import html
import inspect
import re
import sys

import attnzoo
from attnzoo.core.variant import SoftmaxOf
from benchmarks.harness.cases import Case

# LENGTH is the number of keys from which example parameters are computed. HEAD_DIM is the head
# dimension for which the cost of linear forms is stated.
LENGTH, HEAD_DIM = 1024, 64
# The paragraphs of a variant's module docstring, in this order.
SECTIONS = ("Formula", "Effect", "Initial values", "Source", "Differences", "Notes")
# characters that are special in Markdown
ESCAPED = re.compile(r"[\\*$|\[\]{}#~^]|(?<!\w)_|_(?!\w)")
Form = attnzoo.Pairwise | attnzoo.Linear | attnzoo.Shares


def forms_of(name: str) -> list[Form]:
    """The forms of the variant with its example parameters."""
    case = Case.parse(name, LENGTH)
    return [form for form in (case.pairwise, case.linear, case.shares) if form is not None]


def cost(form: Form) -> str:
    """A formula: number of multiplications per head for N queries and N keys of dimension D."""
    if isinstance(form, attnzoo.Linear):
        return f"N·F·D, F = {form.size(HEAD_DIM)} at D = {HEAD_DIM}"
    if isinstance(form, attnzoo.Shares):
        return "N²·D"
    more = {"threshold": ", and a threshold solved per row", "select": ", and a selection per row"}
    twice = ", keys read twice" if isinstance(form.gain, attnzoo.FromStatistics) else ""
    return "N²·D" + more.get(form.normalize, twice)


def default(param: attnzoo.Param) -> str:
    if param.default is attnzoo.REQUIRED:
        return "required"
    return f"{param.default:.3g}" if isinstance(param.default, float) else str(param.default)


def linked(text: str) -> str:
    """The text with a link for each arXiv number."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def typeset(formula: str) -> str:
    """The formula with its subscripts and superscripts in HTML.

    >>> typeset("w_ij = [x − τ_i]_+^{1/α}, train_length > 0")
    'w<sub>ij</sub> = [x − τ<sub>i</sub>]<sub>+</sub><sup>1/α</sup>, train_length &gt; 0'
    """
    text = html.escape(formula, quote=False)
    text = re.sub(r"\^(?:\{([^}]*)\}|([-−]?\w+(?:\.\d+)?))", r"<sup>\1\2</sup>", text)
    # Only a single letter or a closing bracket gets a subscript: train_length stays as it is.
    return re.sub(
        r"(?:(?<=\W\w)|(?<=^\w)|(?<=[\])|])|(?<=\w)(?=_\d))_(?:\{([^}]*)\}|(\d[\d.]*|\w+|\+))",
        r"<sub>\1\2</sub>",
        text,
    )


def prose(text: str) -> str:
    """A docstring's paragraphs in Markdown, with Markdown's special characters escaped.

    >>> print(prose("e^2 * ``a_b``, see arXiv:1706.03762 [1]"))
    e<sup>2</sup> \\* `a_b`, see [arXiv:1706.03762](https://arxiv.org/abs/1706.03762) \\[1\\]
    """
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    parts[::2] = [ESCAPED.sub(r"\\\g<0>", typeset(part)) for part in parts[::2]]
    parts[1::2] = [f"`{part.strip('`')}`" for part in parts[1::2]]
    return linked("".join(parts))


def module_of(variant: attnzoo.Variant) -> str:
    weights = variant.weights
    return (weights.scores if isinstance(weights, SoftmaxOf) else weights).__module__


def docstring(variant: attnzoo.Variant) -> tuple[str, dict[str, str]]:
    """The summary and the sections of the docstring of the variant's file."""
    text = inspect.cleandoc(sys.modules[module_of(variant)].__doc__ or "")
    heads = "|".join(SECTIONS)
    summary, *parts = re.split(rf"^({heads}):[ \n]", text, flags=re.MULTILINE)
    sections = {head: inspect.cleandoc(body) for head, body in zip(parts[::2], parts[1::2])}
    return " ".join(summary.split()).removeprefix(f"{variant.name}: "), sections
