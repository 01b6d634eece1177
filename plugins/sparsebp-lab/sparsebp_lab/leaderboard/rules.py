"""Hold the rules of the leaderboard and its tasks, each a study. They are in ``docs/results/leaderboard/v1`` in a
checkout, and in the wheel data of this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.recipe.schema import Name, PositiveInt, Section
from sparsebp_cli.run.budget import LARGEST_SMALL, read_bounded

VERSION = 1
PLACES = (
    Path(__file__).parent / f"v{VERSION}",
    Path(__file__).parents[4] / "docs" / "results" / "leaderboard" / f"v{VERSION}",
)
ARCHIVE = ".tar.gz"  # ending of the archive beside a study


class SeedsRule(Section):
    """How many seeds there are."""

    tune: PositiveInt = Field(description="Seeds with which each combination is tuned.")
    report: PositiveInt = Field(description="Seeds of the runs that are compared.")


class TaskRule(Section):
    """Data about a task beside its study."""

    data: str = Field("", description="Digest of its examples, as every event log has it; empty: not known yet.")
    flops: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="What each run may spend; null: not known yet."
    )


class Rules(Section):
    """The rules of a version."""

    version: Literal[1] = Field(description="Version of the leaderboard.")
    seeds: SeedsRule = Field(description="How many seeds there are.")
    controls: list[Name] = Field(description="Arms that are no methods; every study of a task has the task's.")
    may_change: Annotated[list[str], Field(min_length=1)] = Field(
        description="Keys of a recipe, and all below them, that make a method."
    )
    tasks: dict[Name, TaskRule] = Field(description="Task to what is known of it.")


@dataclass(frozen=True)
class BoardRules:
    """The rules and the folder of the tasks' studies."""

    folder: Path
    rules: Rules

    def find_task(self, name: str) -> Path:
        """Return the file of a task's study. Raise UsageError if there is no such task."""
        known = [*self.rules.tasks]
        if name not in known:
            raise UsageError(f"no task {name!r}; there are {', '.join(known)}{did_you_mean(name, known)}")
        return self.folder / f"{name}.yaml"


def load_board(place: Path | None = None) -> BoardRules:
    """Read the rules, from ``place`` if given. Raise UsageError if they are missing or invalid."""
    folder = place or next((one for one in PLACES if one.is_dir()), PLACES[0])
    file = folder / "rules.yaml"
    try:
        return BoardRules(folder, Rules.model_validate(yaml.safe_load(read_bounded(file, LARGEST_SMALL))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file} has no valid rules of the leaderboard: {' '.join(str(error).split())}") from None
