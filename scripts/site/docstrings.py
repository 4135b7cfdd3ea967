"""Prepares docstrings for Sphinx: escapes formulas, shortens defaults, links to public names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from docutils.nodes import reference
from sphinx.domains.python import PythonDomain
from sphinx.pycode import ModuleAnalyzer

import attnzoo
from attnzoo import losses, nn

EXPORTED = {
    **{name: f"attnzoo.{name}" for name in attnzoo.__all__},
    **{name: f"attnzoo.losses.{name}" for name in losses.__all__},
    **{name: f"attnzoo.nn.{name}" for name in nn.__all__},
}
CODE = re.compile(r"(``.+?``|`[^`]+`)")
# In formulas, |q|, * and x_ are not reST markup. In shapes such as (*, d), * is not markup either.
MARKUP = re.compile(r"(\||(?<![\w*])\*+(?=[\w,)])|(?<=\w)\*+|(?<=[\w\])])_(?!\w))")


def escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape text that reStructuredText would read as markup, except in code and tables."""
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ")  # napoleon reads text before ": " as a type
    inside = False
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            inside = True
        elif not line.strip():
            inside = False
        if inside or re.match(r"\s*=+  =", line):
            continue
        line = re.sub(r"^Attributes besides .*:$", "Attributes:", line)
        # In "a, b: text" Sphinx would take only "b" as the name.
        line = re.sub(r"^\s+\w+(?:, \w+)+(?=: )", lambda m: m[0].replace(", ", ","), line)
        parts = CODE.split(line)
        parts[::2] = [MARKUP.sub(lambda m: "".join("\\" + c for c in m[0]), x) for x in parts[::2]]
        lines[i] = "".join(parts)


def find(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link a name in a signature to the public name. Sphinx knows only the path in the code."""
    target = node.get("reftarget", "")
    public = EXPORTED.get(target.rsplit(".", 1)[-1])
    if node.get("refdomain") != "py" or public in (None, target):
        return None
    entry = env.domains["py"].objects.get(public)
    if entry is None:
        return None
    uri = app.builder.get_relative_uri(node.get("refdoc", env.docname), entry.docname)
    return reference("", "", contnode, internal=True, refuri=f"{uri}#{entry.node_id}")


def readable(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """Shorten long defaults, and defaults that Sphinx cannot parse."""
    if signature is not None:
        signature = re.sub(r"<function ((?:[\w.]|<\w+>)+)[^<>]*>", shortened, signature)
        # Defaults that are tuples of instances, such as metrics, become "(...)".
        instance = r"[A-Z]\w*\((?:[^()]|\([^()]*\))*\)(?:, )?"
        signature = re.sub(rf"\((?:{instance})+\)", "(...)", signature)
        signature = signature.replace("<factory>", "...")
    return signature, returns


def shortened(function: re.Match[str]) -> str:
    return function[1].rsplit(".", 1)[-1].replace("<lambda>", "...")


def without_overloads(analyze: Callable[[ModuleAnalyzer], None]) -> Callable[..., None]:
    """Drop overloads, because Sphinx would print a signature for each of them."""

    def analyze_without_overloads(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}

    return analyze_without_overloads


def setup(app: Any) -> dict[str, bool]:
    ModuleAnalyzer.analyze = without_overloads(ModuleAnalyzer.analyze)
    directive: Any = PythonDomain.directives["class"]
    for field in directive.doc_field_types:
        field.label = {"variable": "Attributes"}.get(field.name, field.label)
    app.connect("autodoc-process-signature", readable)
    # This runs before napoleon, so that the markup of napoleon is not escaped.
    app.connect("autodoc-process-docstring", escape, priority=400)
    app.connect("missing-reference", find)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
