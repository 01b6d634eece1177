"""Everything for a first start: the recipes that ship, a folder for a user's study, and a package for a policy."""

from sparsebp_cli.cli.starter.folder import Task, default_data, make_starter
from sparsebp_cli.cli.starter.package import make_package
from sparsebp_cli.cli.starter.shipped import ShippedRecipe, collect_files, find_shipped, list_shipped, resolve_recipe
from sparsebp_cli.cli.starter.template import check_new, write_files

__all__ = [
    "ShippedRecipe",
    "Task",
    "check_new",
    "collect_files",
    "default_data",
    "find_shipped",
    "list_shipped",
    "make_package",
    "make_starter",
    "resolve_recipe",
    "write_files",
]
