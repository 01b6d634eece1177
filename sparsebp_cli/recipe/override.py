"""Override recipe keys from the command line: ``training.max_steps=5`` sets a key, ``~model.lora`` deletes one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.policy.error_text import shorten, show
from sparsebp_cli.recipe.document import DEEPEST, LARGEST_INT, Node, Place, read_document
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run.visible import mask


def apply_override(tree: Node, change: str) -> Node:
    """Return a new tree with one override applied: ``KEY=VALUE`` or ``~KEY``. The key is dotted; the value is YAML, and
    an empty one is null. A number indexes a list, and the first free index appends. Missing mappings are created. Raise
    RecipeError if the override cannot be read or its path does not exist."""
    place = Place(f"--set {shorten(mask(change))}")
    key, equals, value = change.partition("=")
    deletes = key.startswith("~")
    key = key.removeprefix("~").strip()
    parts = key.split(".")
    if bool(equals) == deletes or not all(parts) or not key.isprintable() or len(parts) > DEEPEST:
        raise place.error("must be KEY=VALUE or ~KEY, with a dotted key such as training.max_steps")
    if parts[0] == "base":
        raise place.error("set base in the recipe's file; --set cannot change it")
    if deletes:
        return _delete(tree, parts, 0, place)
    node = read_document(value, place.file, parts) or Node(None, place)
    return set_value(tree, parts, replace(node, key_place=place))


def set_value(node: Node, parts: Sequence[str], value: Node, depth: int = 0) -> Node:
    """Return a new tree with a value at a dotted key, given as its parts. ``parts[:depth]`` is the path of the node.
    Raise RecipeError at the value's place if the key does not exist."""
    if depth == len(parts):
        return value
    place, part = value.place, parts[depth]
    if isinstance(node.content, list):
        index = _read_index(node.content, parts, depth, place, can_append=True)
        items = node.content if index < len(node.content) else [*node.content, Node({}, place, place)]
        items = [set_value(item, parts, value, depth + 1) if i == index else item for i, item in enumerate(items)]
        return replace(node, content=items)
    if not isinstance(node.content, dict):
        here = ".".join(parts[:depth])
        raise place.error(f"{here} is {show(node.content)}, so it has no keys")
    child = node.content.get(part)
    if child is None or child.content is None:
        child = Node([] if depth == 0 and part == "policy" else {}, place, place)
    return replace(node, content={**node.content, part: set_value(child, parts, value, depth + 1)})


def _delete(node: Node, parts: Sequence[str], depth: int, place: Place) -> Node:
    part, is_last = parts[depth], depth == len(parts) - 1
    if isinstance(node.content, list):
        index = _read_index(node.content, parts, depth, place, can_append=False)
        if is_last:
            return replace(node, content=[*node.content[:index], *node.content[index + 1 :]])
        items = [_delete(item, parts, depth + 1, place) if i == index else item for i, item in enumerate(node.content)]
        return replace(node, content=items)
    if not isinstance(node.content, dict) or part not in node.content:
        known = list(node.content) if isinstance(node.content, dict) else []
        here = ".".join(parts[: depth + 1])
        raise place.error(
            f"cannot remove {shorten(here)}, because the recipe does not set it{did_you_mean(part, known)}"
        )
    kept = {key: child for key, child in node.content.items() if key != part}
    if is_last:
        return replace(node, content=kept)
    return replace(node, content={**node.content, part: _delete(node.content[part], parts, depth + 1, place)})


def _read_index(items: Sequence[Node], parts: Sequence[str], depth: int, place: Place, *, can_append: bool) -> int:
    here, part = ".".join(parts[:depth]), parts[depth]
    last = len(items) - (0 if can_append else 1)
    if re.fullmatch("[0-9]{1,6}", part, re.ASCII) and int(part) <= last:
        return int(part)
    count = f"{here} is a list of {len(items)}"
    if re.fullmatch("[0-9]+", part, re.ASCII):
        allowed = f"an index in [0, {last}]" if last >= 0 else "none, because the list is empty"
        raise place.error(f"{count}: got index {shorten(part)}, allowed: {allowed}")
    better = ".".join([here, "0", *parts[depth:]])
    raise place.error(f"{count}: write an index after {here}; did you mean {shorten(better)}?")


MOST_SEEDS = 1000


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as ``0-4``, ``0,2,5`` or ``0-2,7``, and return them in that order. Ranges include both ends.
    Raise UsageError for other forms, repeated seeds, descending ranges, or more than 1000 seeds."""
    start = f"--seeds {shorten(text)}"
    seeds: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,19})\s*(?:-\s*([0-9]{1,19})\s*)?", part, re.ASCII)
        if not match:
            raise UsageError(f"{start}: must be numbers and ranges such as 0-4 or 0,2,5, got {shorten(repr(part))}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(f"{start}: a range must ascend, got {first}-{last}; did you mean {last}-{first}?")
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
    """Return a copy of a recipe with another seed. Raise UsageError if the seed is negative or too large."""
    if isinstance(seed, bool) or not 0 <= seed <= LARGEST_INT:
        raise UsageError(f"seed must be in [0, {LARGEST_INT}], got {seed}")
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"seed": seed})})


def with_stop(recipe: Recipe, stop_at: int | None) -> Recipe:
    """Return a recipe that stops with a checkpoint after a step (None: its last). The run's id does not change."""
    return recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"stop_at": stop_at})})
