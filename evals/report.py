"""report.html: tables, pictures and settings in one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from evals.tables import Table

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 68rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
img { max-width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; margin: 0 0 1.4rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
thead th { border-bottom: 2px solid #555; }
.note { background: #f3f3f0; border-left: 4px solid #0072B2; padding: .5rem .8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  body { padding: .7rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  th:first-child, td:first-child { max-width: 9.5rem; white-space: normal;
                                   overflow-wrap: anywhere; }
}
"""


def _table(table: Table) -> str:
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f"<h3>{escape(table.title)}</h3><div class='wide'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _image(picture: bytes, words: str) -> str:
    data = base64.b64encode(picture).decode()
    return f"<p><img alt='{escape(words, quote=True)}' src='data:image/png;base64,{data}'></p>"


def report_html(
    title: str,
    paragraphs: Sequence[str],
    tables: Sequence[Table],
    pictures: Mapping[str, bytes],
    more: Sequence[Table],
    settings: Mapping[str, object],
) -> str:
    """The page; every text is escaped.

    Args:
        title, paragraphs: what was run, and the notes to read first.
        tables: shown above the pictures.
        pictures: PNG bytes by what they show.
        more: tables below the pictures.
        settings: what the figures depend on.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p class='note'>{escape(paragraph)}</p>" for paragraph in paragraphs]
    parts += [_table(table) for table in tables]
    parts.append("<h2>Pictures</h2>")
    parts += [_image(picture, words) for words, picture in pictures.items()]
    parts.append("<h2>Why: scorer, weights, decoder</h2>")
    parts += [_table(table) for table in more]
    parts.append("<h2>Settings</h2><dl>")
    parts += [
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in settings.items()
    ]
    parts.append("</dl>")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )
