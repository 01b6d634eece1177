"""The shell of every HTML page: head, base style, table macro, and the check of a page's path."""

from sparsebp_cli.page.shell import check_path, render

__all__ = ["check_path", "render"]
