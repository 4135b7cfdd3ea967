"""Mends what Sphinx and its theme write for readers of a screen."""

from __future__ import annotations

from typing import Any

# The list of parameters in a signature has no terms, so it is no list of definitions.
PARAMETERS = "\n\n<dl>\n<dd>"


def mended(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    if "body" in context:
        new = PARAMETERS.replace("<dl>", '<dl role="presentation">')
        context["body"] = context["body"].replace(PARAMETERS, new)


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", mended)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
