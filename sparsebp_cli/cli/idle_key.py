"""Name the keys of a recipe that have no effect beside its other keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.errors import DataError

if TYPE_CHECKING:
    from sparsebp_cli.recipe import Recipe

SUBSETS = "only a dataset on the hub, or a folder of data files, has subsets"


def find_idle_keys(recipe: Recipe, folders: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence for each key that differs from its default and has no effect. These are no errors: a base
    recipe may set such a key for others. Relative paths are searched in the folders in order."""
    from sparsebp_cli.policy.error_text import show
    from sparsebp_cli.recipe.evaluation import has_own_worker
    from sparsebp_cli.source import DATASETS, MODELS

    if not has_own_worker(recipe):
        return  # another worker may read any key
    data, training, checkpoint, target = recipe.dataset, recipe.training, recipe.checkpoint, recipe.target.options
    source = _find(data.name, DATASETS, folders)
    is_local = recipe.model.name is None or not isinstance(_find(recipe.model.name, MODELS, folders), str)
    one_length = training.group_by == "length" and data.format == "text"
    ends = checkpoint.stop_at is not None and checkpoint.stop_at >= training.max_steps
    reasons = {
        "model.revision": is_local and "the model is not read from the hub",
        "dataset.revision": not isinstance(source, str) and f"{data.name} is not read from the hub",
        "dataset.subset": (callable(source) or (isinstance(source, Path) and source.is_file())) and SUBSETS,
        "dataset.eval_fraction": data.eval_split is not None and f"dataset.eval_split is {data.eval_split}",
        "training.warmup_steps": training.lr_scheduler_type == "constant"
        and "training.lr_scheduler_type is constant; constant_with_warmup has a warm-up",
        "training.weight_decay_of": training.weight_decay == 0 and "training.weight_decay is 0",
        "training.group_by": one_length and "all blocks of 'dataset.format: text' have the same length",
        "measure.fidelity_draws": recipe.measure.fidelity_every is None and "measure.fidelity_every is null",
        "checkpoint.stop_at": ends and f"the run ends after training.max_steps: {training.max_steps}",
        "target.peer_timeout_min": target.get("processes") == 1 and "target.processes is 1",
        "target.mounts": target.get("container") == "none" and "target.container is none",
        "target.image": target.get("container") == "none" and "target.container is none",
    }
    for key, reason in reasons.items():
        if reason and (value := _read_unless_default(recipe, *key.split("."))) is not None:
            yield f"{key}: {show(value)} has no effect, because {reason}"


def _read_unless_default(recipe: Recipe, section: str, name: str) -> object:
    """Return a key's value; None if it is the default."""
    from sparsebp_cli.recipe.target import find_target

    part = getattr(recipe, section)
    fields = (find_target(part.kind).options_class if section == "target" else type(part)).model_fields
    value = part.options[name] if section == "target" else getattr(part, name)
    return None if value == fields[name].get_default(call_default_factory=True) else value


def _find(name: str, group: str, folders: Sequence[Path]) -> object:
    """Return what a name refers to; None if only the machine that trains may have it."""
    from sparsebp_cli.source import find_source

    try:
        return find_source(name, group, folders)
    except DataError:
        return None
