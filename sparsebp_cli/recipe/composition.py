"""A recipe held against the table of what goes with what, and what only its own words can be wrong in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from sparsebp_cli.composition import PolicyFacts, Setup, find_optimizer, find_refusals
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import make_policy
from sparsebp_cli.policy.finding import Finding, Location
from sparsebp_cli.policy.phrase import show
from sparsebp_cli.recipe.schema import Recipe, TargetOptions

OWN_WORKER = TargetOptions.model_fields["worker"].default
# Where a recipe has the options of the table.
PLACES: dict[str, Location] = {
    "sites": ("backward", "sites"),
    "execution": ("backward", "execution"),
    "update": ("backward", "update"),
    "eager_clip": ("backward", "eager_clip"),
    "checkpointing": ("backward", "checkpointing"),
    "segments": ("backward", "segments"),
    "max_grad_norm": ("training", "max_grad_norm"),
    "optim": ("training", "optim"),
    "mixed_precision": ("training", "mixed_precision"),
    "dtype": ("model", "dtype"),
    "float8": ("model", "float8"),
    "lora": ("model", "lora"),
    "format": ("dataset", "format"),
    "independent_examples": ("measure", "independent_examples"),
    "processes": ("target", "processes"),
    "sharding": ("target", "sharding"),
}


def find_unbuilt(recipe: Recipe, data: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Find what does not go together, each section being right by itself.

    Args:
        recipe: Its policies and their options are right, too.
        data: As the user wrote it, which is told apart from what is a default; None: nobody wrote it.

    Yields:
        What is wrong, at the key to be changed.
    """
    for refusal in find_refusals(_setup(recipe, data)):
        place: Location = PLACES[refusal.row.blame] if refusal.row.blame else ("policy", refusal.policy or 0, "name")
        key = ".".join(str(part) for part in place)
        yield Finding(place, refusal.text.removeprefix(f"{key}: "))
    yield from _find_arguments(recipe)


def refuse_unbuilt(recipe: Recipe) -> None:
    """Refuse a recipe whose parts do not go together.

    Args:
        recipe: Of a plan, which may have been written by another version, or by hand.

    Raises:
        UnsupportedError: The first thing that is wrong, in the words of ``sparsebp validate``.
    """
    for finding in find_unbuilt(recipe):
        raise UnsupportedError(f"{finding.key}: {finding.text}")


def has_own_worker(recipe: Recipe) -> bool:
    """Return whether the worker that ships carries a recipe out."""
    return bool(recipe.target.options.get("worker", OWN_WORKER) == OWN_WORKER)


def _setup(recipe: Recipe, data: Mapping[str, Any] | None) -> Setup:
    values = {name: _read(recipe, section, key) for name, (section, key) in PLACES.items()}
    policies = [
        PolicyFacts.of(make_policy(entry.name, **entry.options), repr(entry.name), f"policy.{number}")
        for number, entry in enumerate(recipe.policy)
    ]
    words = {}
    if data is not None and "max_grad_norm" not in data.get("training", {}):
        words["max_grad_norm"] = f"{_spell('max_grad_norm', values['max_grad_norm'])}, the default,"
    with suppress(UsageError):  # an unknown optimizer is a finding of its own
        values["optim_is_sharded"] = find_optimizer(recipe.training.optim).is_sharded
    return Setup(policies, values | {"loop": "worker"}, _spell, words)


def _read(recipe: Recipe, section: str | int, key: str | int) -> object:
    part = getattr(recipe, str(section))
    if section == "target":
        return part.options.get(key, TargetOptions.model_fields[str(key)].default)
    return getattr(part, str(key))


def _spell(name: str, value: object) -> str:
    text = "null" if value is None else value if isinstance(value, str) else show(value)
    return ".".join(str(part) for part in PLACES[name]) + f": {text}" if name else str(text)


def _find_arguments(recipe: Recipe) -> Iterator[Finding]:
    """Find an optimizer that is not there, and arguments that it does not take."""
    training = recipe.training
    if not has_own_worker(recipe):
        return  # another worker reads them as it likes
    try:
        known = find_optimizer(training.optim).arguments
    except UsageError as error:
        yield Finding(("training", "optim"), str(error))
        return
    for name in training.optim_args:
        if name == "lr":
            text = "is training.learning_rate"
        elif name not in known:
            text = f"{training.optim} has {', '.join(known)}{did_you_mean(name, known)}"
        else:
            continue
        yield Finding(("training", "optim_args", name), text, "unknown")
