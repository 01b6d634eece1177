"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebp_cli.cli.completion import complete_change, complete_recipe, complete_run
from sparsebp_cli.cli.screen import Output

RUN_HELP = "A run: its id, the beginning of the id, a recipe's name, or @last. Several: @N (the newest N runs) or @TAG."

RECIPE_HELP = "Recipe files (YAML), or names of `sparsebp recipes`."


def resolve_all(given: list[Path] | None) -> list[Path] | None:
    """Return the files that typed recipes name; see :func:`~sparsebp_cli.cli.starter.resolve_recipe`."""
    from sparsebp_cli.cli.starter import resolve_recipe

    return given and [resolve_recipe(path) for path in given]


def resolve_one(given: Path | None) -> Path | None:
    """Return the file that a typed recipe names."""
    from sparsebp_cli.cli.starter import resolve_recipe

    return given and resolve_recipe(given)


OneRecipe = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe, or the plan.json of a run.",
        callback=resolve_one,
        autocompletion=complete_recipe,
    ),
]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
ManyRuns = Annotated[list[str], typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
Recipes = Annotated[
    list[Path],
    typer.Argument(metavar="RECIPE", help=RECIPE_HELP, callback=resolve_all, autocompletion=complete_recipe),
]
OptionalRecipes = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RECIPE", help=RECIPE_HELP, callback=resolve_all, autocompletion=complete_recipe),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="RUN",
        help="Train the recipe of this run, instead of a recipe file.",
        autocompletion=complete_run,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe, such as training.max_steps=50. ~KEY removes a key. Can be repeated.",
        autocompletion=complete_change,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option("--seeds", metavar="LIST", help="One run for each of these seeds, such as 0-4 or 0,2,5."),
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Start in the background, print the ids of the runs, and return.")
]
Format = Annotated[Output, typer.Option("-o", "--output", help="A table for people, or JSON for programs.")]
