"""``sparsebp schema``: the JSON schema of recipes, for editors."""

from __future__ import annotations

from sparsebp_cli.cli.screen import print_json


def schema() -> None:
    """Print the JSON schema of recipes, with the options of every installed policy."""
    from sparsebp_cli.recipe import recipe_schema

    print_json(recipe_schema())
