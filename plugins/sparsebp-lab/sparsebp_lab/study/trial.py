"""Trials: single runs of a study. A trial's id follows from what it trains, so it is trained only once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparsebp_cli.plan.identity import find_code, find_data, identify
from sparsebp_cli.plan.plan import content_hash, find_sources, group_content, resolve_paths
from sparsebp_cli.recipe import Recipe, with_seed
from sparsebp_cli.recipe.evaluation import without_generation
from sparsebp_lab.study.loader import ArmVariant

Role = Literal["rehearse", "tune", "report", "control"]

REHEARSED_STEPS = 10  # steps of an arm's first rehearsal
NEVER = 1e300  # FLOPs: a limit that is never reached, so the run counts its steps
COST_FREE = (
    "learning_rate",
    "warmup_steps",
    "lr_scheduler_type",
    "max_grad_norm",
    "weight_decay",
    "optim_args",
)


@dataclass(frozen=True)
class StudyTrial:
    """One run that a study needs."""

    run_id: str  # 12 hexadecimal digits, derived from recipe, seed, code and data
    role: Role
    arm: str
    combination: str  # the varied values in one line; empty if nothing is varied
    recipe: Recipe  # resolved, with its seed and absolute paths
    group: str  # hash that it shares with its repetitions under other seeds, as in plans
    is_cut: bool = False  # halving ended it before its last step

    @property
    def seed(self) -> int:
        return self.recipe.training.seed

    @property
    def steps(self) -> int:
        return self.recipe.training.max_steps

    @property
    def stop_at(self) -> int | None:
        """The step at which it stops for now; None: at its end."""
        return self.recipe.checkpoint.stop_at


@dataclass
class TrialMaker:
    """Make trials from recipes; read code and data once."""

    study: str  # name of the study, a tag of its runs
    folders: Sequence[Path]  # folders to search for relative paths of models and data
    generation: int = 0  # how often everything was trained again on purpose
    _code: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    _data: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)

    def make(self, role: Role, arm: str, combination: str, recipe: Recipe, seeds: Sequence[int]) -> list[StudyTrial]:
        """Make a trial for each seed."""
        recipe = resolve_paths(recipe, self.folders)
        # The recipe's own tags come last and override.
        tags = {"study": self.study, **recipe.tracking.tags}
        recipe = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"tags": tags})})
        group, code, data = content_hash(group_content(recipe)), self.find_code(recipe), self._find_data(recipe)
        return [
            StudyTrial(
                identify(group, seed, code, data, self.generation),
                role,
                arm,
                combination,
                with_seed(recipe, seed),
                group,
            )
            for seed in seeds
        ]

    def make_all(self, role: Role, variant: ArmVariant, recipe: Recipe, seeds: Sequence[int]) -> list[StudyTrial]:
        """Make a trial of a variant for each seed."""
        return self.make(role, variant.arm, variant.label, recipe, seeds)

    def find_code(self, recipe: Recipe) -> Mapping[str, str]:
        """Return the versions of the code that affects a recipe's results."""
        names = tuple(entry.name for entry in recipe.policy)
        if names not in self._code:
            self._code[names] = find_code(recipe)
        return self._code[names]

    def _find_data(self, recipe: Recipe) -> Mapping[str, str]:
        names = tuple(find_sources(recipe).values())
        if names not in self._data:
            self._data[names] = find_data(recipe)
        return self._data[names]


def with_steps(recipe: Recipe, steps: int, *, fixed_warmup: bool = False) -> Recipe:
    """Return a recipe of another length. Its schedule and its warm-up scale with the length; ``fixed_warmup`` keeps a
    warm-up that was varied on purpose."""
    training = recipe.training
    if training.max_steps == steps:
        return recipe
    warmup = training.warmup_steps
    if warmup >= 1 and not fixed_warmup:
        warmup = max(1, round(warmup * steps / training.max_steps))
    changed = training.model_copy(update={"max_steps": steps, "warmup_steps": min(warmup, steps)})
    return recipe.model_copy(update={"training": changed})


def with_budget(recipe: Recipe, flops: float | None) -> Recipe:
    """Return a recipe that ends when it has spent ``flops``; None: by its steps alone. Its estimated cost may be off by
    2 %; then the last steps, whose learning rate is almost zero, are left out."""
    if flops is None or recipe.measure.probe_every is None:
        return recipe
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"max_flops": flops})})


def rehearse(recipe: Recipe, first: Recipe, steps: int = REHEARSED_STEPS) -> Recipe:
    """Return the recipe of a short run that measures the cost of a step: ten probes, and counts. Keys that do not
    affect the cost come from the arm's ``first`` combination, so combinations of equal cost share a rehearsal."""
    recipe = without_generation(recipe)
    free = {name: getattr(first.training, name) for name in COST_FREE}
    no_limit = {"max_steps": steps, "max_flops": NEVER}
    training = recipe.training.model_copy(update=free | no_limit)
    measure = recipe.measure.model_copy(
        update={
            "probe_every": steps // REHEARSED_STEPS,
            "fidelity_every": None,
            "eval_every": steps,
            "eval_examples": recipe.training.per_device_train_batch_size,
        }
    )
    dataset = recipe.dataset.model_copy(update={"test_split": None, "test_fraction": None})
    checkpoint = recipe.checkpoint.model_copy(update={"every": steps})
    return recipe.model_copy(
        update={"training": training, "measure": measure, "dataset": dataset, "checkpoint": checkpoint}
    )
