"""Arguments and options that several verbs share, and their shell completions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebp_cli.cli.screen import Output
from sparsebp_cli.run import list_runs

MOST_COMPLETIONS = 50


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """Return the runs that begin with the typed text: id or name, and a help text."""
    words = {"@last": "the newest run"}
    for run in list_runs()[:MOST_COMPLETIONS]:
        name = run.brief()[0]
        words |= {run.run_id: name, name: "every run of this name"}
    return [(word, text) for word, text in words.items() if word.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipe files and folders that begin with the typed text; folders end in a slash."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    start = "" if incomplete.endswith("/") else Path(incomplete).name
    try:
        files = sorted(path for path in folder.iterdir() if path.name.startswith(start))
    except OSError:
        return []
    found = [f"{path}/" if path.is_dir() else str(path) for path in files if not path.name.startswith(".")]
    return [path for path in found if path.endswith(("/", ".yaml", ".yml"))]


RUN_HELP = "An id, its beginning, a recipe's name, @last, or @N for the newest N."

OneRun = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
ManyRuns = Annotated[list[str], typer.Argument(metavar="RUN...", help=RUN_HELP, autocompletion=complete_run)]
Recipes = Annotated[
    list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files (YAML).", autocompletion=complete_recipe)
]
OptionalRecipes = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RECIPE", help="Recipe files (YAML).", autocompletion=complete_recipe),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="RUN",
        help="In place of files: the recipe that this run keeps. No file is written.",
        autocompletion=complete_run,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key: training.max_steps=50; ~KEY takes it out. Repeat."),
]
Seeds = Annotated[str | None, typer.Option("--seeds", metavar="LIST", help="One run a seed: 0-4 or 0,2,5.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Start, print the run's id, and return.")]
Format = Annotated[Output, typer.Option("-o", "--output", help="A table for people, or JSON for programs.")]
