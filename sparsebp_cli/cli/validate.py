"""``sparsebp validate``: check recipes without starting anything; with ``--probe``, rehearse one step of each."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.option import Changes, Recipes, Seeds
from sparsebp_cli.cli.recipe_check import load_checked
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.stored_run import describe_policies
from sparsebp_cli.errors import SparseBPError, UsageError

Probing = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Also load model and data here and rehearse the first step: its cost against dense, what a kept token "
        "must be worth, and what choosing could gain at most. Nothing is trained.",
    ),
]


def validate(recipes: Recipes, changes: Changes = None, seeds: Seeds = None, probe: Probing = False) -> None:
    """Check recipes, what goes together in them, and the files that they name; exit code 2 when one is wrong."""
    from sparsebp_cli.cli.preview import preview
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import parse_seeds

    num_runs, wrong = len(parse_seeds(seeds)) if seeds is not None else 1, 0
    for file in recipes:
        try:
            recipe, _, unknown = load_checked(file, changes or [])
            lines = preview(make_plan(recipe, file)) if probe else []
        except SparseBPError as error:
            print_line(f"error: {error}", stderr=True)
            wrong += 1
            continue
        config = recipe.model.config or {}
        model = recipe.model.name or f"random {config.get('model_type')}"
        policy = describe_policies(recipe.model_dump(mode="json"))
        steps = f"{recipe.training.max_steps} steps, {num_runs} run{'s' * (num_runs > 1)}"
        print_line(f"ok {file}: {recipe.name}: model {model}, data {recipe.dataset.name}, policy {policy}, {steps}")
        for text in unknown:
            print_line(f"   not known from here: {text}")
        for line in lines:
            print_line(f"   {line}")
    if wrong:
        raise typer.Exit(UsageError.exit_code)
