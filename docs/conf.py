"""How Sphinx builds the documentation. No network is used."""

from sparsebp_cli import __version__

project = "SparseBP"
author = "The SparseBP authors"
copyright = author  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "generator", "picture/*.md"]
html_theme = "furo"
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
