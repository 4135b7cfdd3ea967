"""Settings of the documentation site, which `make docs` builds. Neither the build nor the pages
load anything from the network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The notebooks run small models. Several threads would be much slower than one, because they wait
# for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attnzoo  # noqa: E402

project = "attnzoo"
author = "the attnzoo authors"
repository = ""  # the address of the repository; while it is empty, no page links to one
version = release = attnzoo.__version__
project_copyright = f"{author}, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "scripts.site.accessibility",
    "scripts.site.api",
    "scripts.site.docstrings",
    "scripts.site.mathml",
    "scripts.site.pages",
    "scripts.site.synonyms",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
templates_path = ["_templates"]
nitpicky = True
# Unresolved references are allowed for words in backticks in docstrings, for types of other
# packages, and for names from private modules in signatures. All others are errors.
nitpick_ignore_regex = [
    (r"py:obj", r".*"),
    (r"py:.*", r"(?!attnzoo\.).*"),
    (r"py:class", r"attnzoo\.(backends|core|functional|integrations\.sdpa|losses)\..*"),
    (r"py:class", r"attnzoo\.(distributed|nn|integrations\.transformers)\.[a-z_]+\..*"),
]
show_warning_types = True

# Pages and notebooks
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # the default loads scripts from a CDN

# Docstrings
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

# HTML
html_theme = "pydata_sphinx_theme"
html_title = f"attnzoo {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["attnzoo.css"]
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["contents"]}
html_theme_options: dict[str, object] = {
    "logo": {"text": "attnzoo"},
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "back_to_top_button": False,
    "search_bar_text": "Search",
}
if repository:
    link = {"name": "Repository", "url": repository, "icon": "fa-solid fa-code-branch"}
    html_theme_options["icon_links"] = [link]

# Copy buttons: without prompts and outputs
copybutton_exclude = ".linenos, .gp, .go"
