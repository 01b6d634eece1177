"""``sparsebp data``: count and show what a recipe trains on, without training or loading weights."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.recipe_record import DataAnswer
from sparsebp_cli.cli.option import Changes, OneRecipe
from sparsebp_cli.cli.screen import Output, console


def data(
    recipe: OneRecipe,
    changes: Changes = None,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="A table and examples for people, or JSON with token ids.")
    ] = Output.TABLE,
) -> None:
    """Show what a recipe trains on: counts, and the first examples with the tokens that count in the loss."""
    from sparsebp_cli.cli.validate import load_checked
    from sparsebp_cli.cli.worker_answer import ask_worker
    from sparsebp_cli.plan import make_plan

    checked, origin, _ = load_checked(recipe, changes or [])
    answer = ask_worker("data_preview", make_plan(checked, origin), "reads the data")
    tell(DataAnswer.read(answer), output, _print)


def _print(found: DataAnswer) -> None:
    from sparsebp_cli.cli.census_table import census_table, print_examples, print_warnings

    census = {"splits": found.splits, "shared": found.shared}
    console().print(census_table(census))
    print_warnings(census)
    print_examples(found.first)
