"""Recipes: read strictly what the user writes, and locate every error."""

from sparsebp_cli.recipe.check import PlacedRecipe
from sparsebp_cli.recipe.composition import refuse_unsupported
from sparsebp_cli.recipe.json_schema import recipe_schema
from sparsebp_cli.recipe.loader import load_placed, load_recipe, load_stored
from sparsebp_cli.recipe.override import parse_seeds, with_seed, with_stop
from sparsebp_cli.recipe.schema import Recipe

__all__ = [
    "PlacedRecipe",
    "Recipe",
    "load_placed",
    "load_recipe",
    "load_stored",
    "parse_seeds",
    "recipe_schema",
    "refuse_unsupported",
    "with_seed",
    "with_stop",
]
