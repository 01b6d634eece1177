"""Check a recipe against the table of supported combinations, and check its optimizer's arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import make_policy
from sparsebp_cli.policy.composition import PolicyFacts, Setup, find_optimizer, find_refusals
from sparsebp_cli.policy.error_text import show
from sparsebp_cli.policy.field_error import FieldError, Location
from sparsebp_cli.policy.known_kind import find_facts
from sparsebp_cli.recipe.evaluation import find_unmeasured, has_own_worker
from sparsebp_cli.recipe.schema import Recipe, TargetOptions

# The key of a recipe for each option of the table.
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
    "compile": ("training", "compile"),
    "dtype": ("model", "dtype"),
    "attention": ("model", "attention"),
    "float8": ("model", "float8"),
    "quantization": ("model", "quantization"),
    "lora": ("model", "lora"),
    "peft": ("model", "peft"),
    "format": ("dataset", "format"),
    "processes": ("target", "processes"),
    "sharding": ("target", "sharding"),
}


def find_unsupported(recipe: Recipe, data: Mapping[str, object] | None = None) -> Iterator[FieldError]:
    """Yield an error for each unsupported combination, located at the key to change. Each section must already be
    valid. ``data`` is the recipe as the user wrote it, to recognise defaults; None if unknown."""
    for refusal in find_refusals(_setup(recipe, data)):
        place: Location = PLACES.get(refusal.rule.blame, ("policy", refusal.policy or 0, "name"))
        key = ".".join(str(part) for part in place)
        yield FieldError(place, refusal.text.removeprefix(f"{key}: "))
    yield from _find_arguments(recipe)
    yield from find_unmeasured(recipe)
    if recipe.training.max_flops is not None and recipe.measure.probe_every is None:
        text = "needs measure.probe_every, because only probes count the FLOPs of a step; got null"
        yield FieldError(("training", "max_flops"), text)


def refuse_unsupported(recipe: Recipe) -> None:
    """Raise UnsupportedError for the first unsupported combination. Plans are checked again because another version or
    a person may have written them."""
    for field_error in find_unsupported(recipe):
        raise UnsupportedError(f"{field_error.key}: {field_error.text}")


def _setup(recipe: Recipe, data: Mapping[str, object] | None) -> Setup:
    values: dict[str, Any] = {name: _read(recipe, section, key) for name, (section, key) in PLACES.items()}
    values["lora"] = recipe.model.adapters
    for name in ("quantization", "peft"):
        values[name] = None if values[name] is None else values[name].type
    policies = [
        PolicyFacts.of(make_policy(entry.name, **entry.options), repr(entry.name), f"policy.{number}")
        for number, entry in enumerate(recipe.policy)
    ]
    words = {}
    if data is not None and "max_grad_norm" not in _keys(data, "training"):
        words["max_grad_norm"] = f"{_format_key('max_grad_norm', values['max_grad_norm'])}, the default,"
    with suppress(UsageError):  # _find_arguments reports an unknown optimizer
        values |= _describe_optimizer(recipe)
    values |= {"loop": "worker", "fused_head": False, "wrapped": "compiled" if values["compile"] else None}
    return Setup(policies, values, _format_key, words)


def _describe_optimizer(recipe: Recipe) -> dict[str, object]:
    """Return the optimizer's facts, and whether the policies provide what some optimizers need."""
    optimizer = find_optimizer(recipe.training.optim)
    facts = [find_facts(make_policy(entry.name, **entry.options)) for entry in recipe.policy]
    return {
        "optim_is_sharded": optimizer.is_sharded,
        "optim_of_adapters": optimizer.of_adapters,
        "optim_of_projections": optimizer.of_projections,
        "chooses_parameters": any(found.get("chooses_parameters") for found in facts),
        "keeps_projections": any(found.get("keeps_projection") for found in facts),
    }


def _keys(data: Mapping[str, object], section: str) -> Collection[str]:
    content = data.get(section)
    return content if isinstance(content, Mapping) else ()


def _read(recipe: Recipe, section: str | int, key: str | int) -> object:
    part = getattr(recipe, str(section))
    if section == "target":
        return part.options.get(key, TargetOptions.model_fields[str(key)].default)
    return getattr(part, str(key))


def _format_key(name: str, value: object) -> str:
    text = "null" if value is None else value if isinstance(value, str) else show(value)
    return ".".join(str(part) for part in PLACES[name]) + f": {text}" if name else str(text)


def _find_arguments(recipe: Recipe) -> Iterator[FieldError]:
    """Yield an error for an unknown optimizer, or for each argument that it does not accept."""
    training = recipe.training
    if not has_own_worker(recipe):
        return  # another worker may interpret them differently
    try:
        known = find_optimizer(training.optim).arguments
    except UsageError as error:
        yield FieldError(("training", "optim"), str(error))
        return
    for name in training.optim_args:
        if name == "lr":
            text = "not an option here; set training.learning_rate instead"
        elif name not in known:
            text = f"not an argument of {training.optim}; allowed: {', '.join(known)}{did_you_mean(name, known)}"
        else:
            continue
        yield FieldError(("training", "optim_args", name), text, "unknown")
