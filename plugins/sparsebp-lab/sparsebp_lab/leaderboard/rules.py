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

    tune: PositiveInt = Field(description="Number of seeds with which each combination of values is tuned.")
    report: PositiveInt = Field(description="Number of seeds with which each arm is trained for the comparison.")


class TaskRule(Section):
    """Data about a task beside its study."""

    data: str = Field("", description="Digest of the task's examples, as event logs contain it; empty: not known yet.")
    flops: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="FLOPs that each run may spend; null: not known yet."
    )


class Rules(Section):
    """The rules of a version."""

    version: Literal[1] = Field(description="Version of the leaderboard.")
    seeds: SeedsRule = Field(description="Numbers of seeds for tuning and for the comparison.")
    controls: list[Name] = Field(
        description=(
            "Names of arms that are controls, not methods. A submitted study must contain the controls of its task."
        )
    )
    may_change: Annotated[list[str], Field(min_length=1)] = Field(
        description="Keys of a recipe that a method may change, each with all keys below it."
    )
    tasks: dict[Name, TaskRule] = Field(description="Map from the name of a task to what is known about the task.")


@dataclass(frozen=True)
class BoardRules:
    """The rules and the folder of the tasks' studies."""

    folder: Path
    rules: Rules

    def find_task(self, name: str) -> Path:
        """Return the file of a task's study. Raise UsageError if there is no such task."""
        known = [*self.rules.tasks]
        if name not in known:
            raise UsageError(
                f"the leaderboard has no task {name!r}; its tasks are {', '.join(known)}{did_you_mean(name, known)}"
            )
        return self.folder / f"{name}.yaml"


def load_board(place: Path | None = None) -> BoardRules:
    """Read the rules, from ``place`` if given. Raise UsageError if they are missing or invalid."""
    folder = place or next((one for one in PLACES if one.is_dir()), PLACES[0])
    file = folder / "rules.yaml"
    try:
        return BoardRules(folder, Rules.model_validate(yaml.safe_load(read_bounded(file, LARGEST_SMALL))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(
            f"{file} does not contain valid rules of the leaderboard: {' '.join(str(error).split())}"
        ) from None
