"""Define the plan: the resolved recipe and its provenance. ``plan.json`` is the only input of a worker."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import RunNotFoundError, UsageError, first_line
from sparsebp_cli.plan.provenance import Provenance, find_provenance
from sparsebp_cli.policy import ReferenceReader, make_policy
from sparsebp_cli.policy.composition.backward import STORED
from sparsebp_cli.recipe.loader import rename_in_plan
from sparsebp_cli.recipe.schema import LoraSection, PolicyEntry, Recipe
from sparsebp_cli.run import durable
from sparsebp_cli.run.budget import LARGEST_PLAN, read_bounded, read_json
from sparsebp_cli.run.stored_recipe import GONE, find_section, unfold_columns
from sparsebp_cli.source import DATASETS, MODELS, find_path
from sparsebp_cli.source.conversation import read_template

# Runs that differ only in these keys belong to one group.
OUTSIDE_GROUP = {"name": True, "target": True, "tracking": True, "checkpoint": True, "training": {"seed"}}

# Keys that group ids contain even if null. The list is closed: a new key is null by default, and ids leave it out then.
HASHED_NULLS = {
    "model": "name config tokenizer revision dropout float8 quantization lora",
    "dataset": "subset revision eval_split test_split test_fraction chat_template max_examples max_train_examples",
    "backward": "eager_clip segments",
    "training": "max_flops max_grad_norm weight_decay group_by",
    "measure": "eval_examples per_device_eval_batch_size probe_every fidelity_every",
    "measure.generate": "every",
}
FIRST_LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules")


class Plan(BaseModel):
    """The resolved recipe of one run, with everything that a worker needs."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1  # version of this file
    # 12 hexadecimal digits; unchanged by a resume
    run_id: str = Field(default_factory=lambda: secrets.token_hex(6), pattern=r"^[0-9a-f]{12}$")
    created: float = Field(default_factory=time.time)  # seconds since 1970, UTC
    recipe: Recipe  # resolved: base, overrides, seed and all defaults, including those of policies
    provenance: Provenance = Field(default_factory=Provenance)  # of the machine that made the plan

    @property
    def group(self) -> str:
        """Content hash of everything that affects the result except the seed. Runs of one group are repetitions."""
        return content_hash(group_content(self.recipe))

    def save(self, run_folder: Path) -> Path:
        """Write ``plan.json`` atomically and durably into the run's existing folder, and return its path."""
        file = run_folder / "plan.json"
        durable.write_file(file, self.model_dump_json(indent=1))
        return file

    @classmethod
    def load(cls, file: Path) -> Plan:
        """Read a ``plan.json``. Raise RunNotFoundError if the file is missing or not a plan."""
        try:
            return cls.model_validate_json(rename_in_plan(read_bounded(file, LARGEST_PLAN)), context=STORED)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            told = f"{place}: {first['msg']}" if place else first["msg"]
            raise RunNotFoundError(f"{file} is not a plan for this version: {told}{_tell_version(file)}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise RunNotFoundError(f"{file} is not a plan: {first_line(error)}") from None


def _tell_version(file: Path) -> str:
    """Name both versions if another version made the plan: a worker's image may be older than its client."""
    mine = version("sparsebp")
    try:
        theirs = read_json(file, LARGEST_PLAN)["provenance"]["sparsebp_version"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f"; sparsebp {theirs} made it, but this is sparsebp {mine}" if theirs and theirs != mine else ""


def group_content(recipe: Recipe) -> dict[str, object]:
    """Return the part of a recipe that affects the result, except the seed, as JSON content."""
    content: dict[str, Any] = recipe.model_dump(mode="json", exclude=OUTSIDE_GROUP)  # type: ignore[arg-type]
    for path, nulls in HASHED_NULLS.items():
        section = find_section(content, path)
        for key in [key for key, value in section.items() if value is None and key not in nulls.split()]:
            del section[key]
    content["dataset"] = unfold_columns(content["dataset"])
    for path, default in GONE.items():
        place, _, key = path.rpartition(".")
        if place != "model.lora" and path != "dataset.held_out" and (section := find_section(content, place)):
            section[key] = default  # keeps the ids of old groups
    if (warmup := content["training"]["warmup_steps"]) and warmup < 1:  # a fraction was a key of its own
        content["training"] |= {"warmup_steps": 0, "warmup_ratio": warmup}
    if (lora := content["model"]["lora"]) is not None:
        usual = LoraSection().model_dump(mode="json")
        content["model"]["lora"] = {k: v for k, v in lora.items() if k in FIRST_LORA_KEYS or v != usual[k]}
    if (processes := recipe.target.options.get("processes", 1)) > 1:  # processes multiply the examples of each step
        content["target"] = {"processes": processes}
    return content


def content_hash(content: object) -> str:
    """Return 12 hexadecimal digits that depend only on the JSON content, not on the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_plan(recipe: Recipe, recipe_file: Path) -> Plan:
    """Make the plan of one run, with a new run id. Resolve relative paths of models and data against the folder of the
    recipe's file first, then the working folder. Raise UsageError if the recipe's number of steps is not known yet."""
    if recipe.training.num_train_epochs is not None:
        raise UsageError("training.num_train_epochs: this command needs training.max_steps instead")
    resolved = resolve_paths(recipe, [recipe_file.resolve().parent, Path.cwd()])
    return Plan(recipe=resolved, provenance=find_provenance(recipe_file))


def resolve_paths(recipe: Recipe, folders: Sequence[Path]) -> Recipe:
    """Return a recipe with absolute paths of models, data and references, and with the text of its chat template.
    Relative paths are searched in the folders in order."""
    model, dataset = recipe.model, recipe.dataset
    model = model.model_copy(
        update={
            "name": _absolute(model.name, folders, MODELS),
            "tokenizer": _absolute(model.tokenizer, folders, MODELS),
            "adapter": _absolute(model.adapter, folders, MODELS),
        }
    )
    template = dataset.chat_template
    dataset = dataset.model_copy(
        update={
            "name": _absolute(dataset.name, folders, DATASETS),
            # Store the text itself: only the plan is sent to another machine, and the plan identifies a run.
            "chat_template": None if template is None else read_template(template, folders),
        }
    )
    policy = _resolve_references(recipe.policy, folders)
    return recipe.model_copy(update={"model": model, "dataset": dataset, "policy": policy})


def find_sources(recipe: Recipe) -> dict[str, str]:
    """Return names and paths of all that a recipe reads, by key: model, tokenizer, adapter, data, references."""
    named = {
        "model.name": recipe.model.name,
        "model.tokenizer": recipe.model.tokenizer,
        "model.adapter": recipe.model.adapter,
        "dataset.name": recipe.dataset.name,
    }
    named |= {f"policy.{number}.reference": _reference_of(entry) for number, entry in enumerate(recipe.policy)}
    return {key: name for key, name in named.items() if name is not None}


def _reference_of(entry: PolicyEntry) -> str | None:
    """Return the name or path of the model that a policy compares with; None without one."""
    policy = make_policy(entry.name, **entry.options)
    return policy.reference if isinstance(policy, ReferenceReader) else None


def _resolve_references(entries: Sequence[PolicyEntry], folders: Sequence[Path]) -> list[PolicyEntry]:
    found = [(entry, _reference_of(entry)) for entry in entries]
    return [
        entry if name is None else entry.model_copy(update={"reference": _absolute(name, folders, MODELS)})
        for entry, name in found
    ]


def _absolute(name: str | None, folders: Sequence[Path], group: str) -> str | None:
    if name is None or name.startswith("package:") or name in entry_points(group=group).names:
        return name  # an installed name takes precedence over a folder of the same name
    found = find_path(name, folders)
    return name if found is None else str(found)
