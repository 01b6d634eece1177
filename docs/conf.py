"""How Sphinx builds the documentation. No network is used."""

import json
import os

from sparsebp_cli import __version__

project = "SparseBP"
author = "The SparseBP authors"
copyright = author  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_templates", "generator", "picture/*.md"]
templates_path = ["_templates"]
html_theme = "furo"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
# What site.py passes on: the versions beside which this one is built.
html_context = json.loads(os.environ.get("POLYVERSION_DATA", "{}"))
html_title = f"SparseBP {version}"
html_extra_path = ["recipe.schema.json"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
