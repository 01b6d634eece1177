"""Find the weights of a run to release: of its end, of its best evaluation, or of a checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.evaluation import list_measured
from sparsebp_cli.run import History, RunFolder, State, manifest, metric
from sparsebp_cli.source.adapter import CONFIG as ADAPTER_CONFIG

LAST, BEST = "last", "best"
_CHECKPOINT = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class ReleasedWeights:
    """The weights of a run after a step."""

    step: int  # optimizer steps done
    kind: Literal["last", "best", "checkpoint"]
    folder: Path | None = None  # folder of the whole model; None: in the checkpoint of the step
    metric: str = ""  # for the best weights: the metric of checkpoint.keep_best

    @property
    def is_end(self) -> bool:
        """Whether they are the run's final weights, which its test split measured."""
        return self.kind == "last"


def find_weights(run: RunFolder, plan: Plan, history: History, word: str | None) -> ReleasedWeights:
    """Return the weights that ``word`` names: None or ``last``, ``best``, or the step of a checkpoint. Raise
    ``UsageError`` if the run does not have them, or they cannot be verified."""
    if word not in (None, LAST, BEST) and not word.isdecimal():
        raise UsageError(f"--checkpoint must be {LAST}, {BEST} or a step, got {word!r}")
    is_finished, steps = run.state() is State.FINISHED, list_checkpoints(run)
    if word == BEST:
        return _find_best(run, plan, history, is_finished=is_finished)
    end = _find_end(history)
    if is_finished and (word in (None, LAST) or (word == str(end) and end not in steps)):
        return _find_last(run, end, steps)
    if word is None:
        lacks = f"run {run.run_id} is {run.state()} and has no model before it finishes"
        if not steps:
            raise UsageError(f"{lacks}; the run has no checkpoint either")
        raise UsageError(
            f"{lacks}: `sparsebp model {run.run_id} --checkpoint last` writes the model of step {steps[-1]}"
        )
    return _find_checkpoint(run, word, steps)


def list_checkpoints(run: RunFolder) -> list[int]:
    """Return the steps of a run's checkpoints in order, damaged ones included."""
    named = [(_CHECKPOINT.fullmatch(place.name), place) for place in (run.path / "checkpoints").glob("step-*")]
    return sorted(int(name[1]) for name, place in named if name is not None and place.is_dir())


def _find_end(history: History) -> int:
    if history.ends:
        return int(history.ends[-1]["step"])
    return max(history.series(metric.TRAIN_LOSS.name), default=0)


def _find_last(run: RunFolder, step: int, steps: list[int]) -> ReleasedWeights:
    folder = run.path / "model"
    if (folder / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"{folder} has only the adapter, because an older version wrote it: use the folder as model.adapter in a "
            "recipe"
        )
    if damage := manifest.find_damage(folder):
        have = (
            f"the run has checkpoints of step {', '.join(map(str, steps))}" if steps else "the run has no checkpoints"
        )
        raise UsageError(f"run {run.run_id}: its model cannot be verified ({damage}); {have}")
    return ReleasedWeights(step, "last", folder)


def _find_best(run: RunFolder, plan: Plan, history: History, *, is_finished: bool) -> ReleasedWeights:
    name = plan.recipe.checkpoint.keep_best
    if name is None:
        raise UsageError(f"run {run.run_id} has no best weights: its recipe does not set checkpoint.keep_best")
    if not is_finished:
        raise UsageError(f"run {run.run_id} is {run.state()}: its best weights are known only after the run finishes")
    folder = run.path / "best"
    if damage := manifest.find_damage(folder):
        raise UsageError(f"run {run.run_id}: its best weights cannot be verified ({damage}): use --checkpoint last")
    better = list_measured(plan.recipe)[name].better
    values = {step: value for step, value in history.series(name).items() if step > 0 and math.isfinite(value)}
    choose = min if better == "lower" else max
    step = choose(values, key=values.__getitem__) if values else 0
    return ReleasedWeights(step, "best", folder, name)


def _find_checkpoint(run: RunFolder, word: str, steps: list[int]) -> ReleasedWeights:
    have = f"the run has checkpoints of step {', '.join(map(str, steps))}" if steps else "the run has no checkpoints"
    step = max(steps, default=-1) if word == LAST else int(word)
    if step not in steps:
        what = "no last checkpoint" if word == LAST else f"no checkpoint of step {step}"
        raise UsageError(f"run {run.run_id} has {what}: {have}")
    if damage := manifest.find_damage(run.path / "checkpoints" / f"step-{step:08d}"):
        raise UsageError(f"run {run.run_id}: the checkpoint of step {step} is damaged ({damage}); {have}")
    return ReleasedWeights(step, "checkpoint")
