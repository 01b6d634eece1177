"""Convert the epochs of a recipe to steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.worker_answer import ask_worker

if TYPE_CHECKING:
    from sparsebp_cli.recipe import PlacedRecipe
    from sparsebp_cli.recipe.schema import Recipe

KEY = ("training", "num_train_epochs")


def derive_steps(placed: PlacedRecipe, origin: Path, unknown: Sequence[str]) -> Recipe:
    """Return the recipe with ``max_steps`` instead of ``num_train_epochs``, and print the steps. A worker process
    counts the training examples. A recipe without epochs is unchanged. Raise ``RecipeError`` if ``unknown`` says that
    the data or the tokenizer are not on this machine."""
    from sparsebp_cli.plan import make_plan

    recipe, training = placed.recipe, placed.recipe.training
    epochs = training.num_train_epochs
    if epochs is None:
        return recipe
    if unknown:
        text = f"cannot count the examples on this machine ({unknown[0]}); give training.max_steps instead"
        raise placed.error(KEY, text)

    def with_steps(number: int) -> Recipe:
        changed = training.model_copy(update={"max_steps": number, "num_train_epochs": None})
        return recipe.model_copy(update={"training": changed})

    answer = ask_worker("data_preview", make_plan(with_steps(training.max_steps), origin), "reads the data")
    examples = answer["splits"]["train"]["examples"]
    processes = recipe.target.options.get("processes", 1)
    a_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * processes
    steps = math.ceil(epochs * examples / a_step)
    print_line(
        f"{recipe.name}: {epochs:g} epochs of {examples} examples, {a_step} per step: {steps} steps", stderr=True
    )
    return with_steps(steps)
