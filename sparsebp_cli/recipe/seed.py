"""Seeds of a sweep."""

from __future__ import annotations

import re

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.recipe.document import LARGEST_INT
from sparsebp_cli.recipe.schema import Recipe

MOST_SEEDS = 1000


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in a text such as ``0-4``, ``0,2,5`` or ``0-2,7``, in its order; ranges include both ends. Raise
    UsageError for another form, a repeated seed, a descending range, or more than 1000 seeds."""
    start = f"--seeds {shorten(text)}"
    seeds: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,19})\s*(?:-\s*([0-9]{1,19})\s*)?", part, re.ASCII)
        if not match:
            raise UsageError(f"{start}: must be numbers and ranges such as 0-4 or 0,2,5, got {shorten(repr(part))}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(f"{start}: a range must rise, got {first}-{last}; did you mean {last}-{first}?")
        if last > LARGEST_INT:
            raise UsageError(f"{start}: a seed must be in [0, {LARGEST_INT}], got {last}")
        if len(seeds) + last - first + 1 > MOST_SEEDS:
            raise UsageError(f"{start}: at most {MOST_SEEDS} seeds are allowed")
        for seed in range(first, last + 1):
            if seed in seeds:
                raise UsageError(f"{start}: seed {seed} is given twice")
            seeds[seed] = None
    return list(seeds)


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Return a copy of a recipe with another seed, from 0. Raise UsageError if the seed is out of range."""
    if isinstance(seed, bool) or not 0 <= seed <= LARGEST_INT:
        raise UsageError(f"seed must be in [0, {LARGEST_INT}], got {seed}")
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"seed": seed})})
