"""Run a sequential trial: add seeds until a margin is decided, with a fixed chance of error over all interim looks.

A test after every seed that stops at the first significant result is wrong far more often than 5%. So there are few
looks, fixed before the first (after 3, 5, 8, 12, 18, ... shared seeds), and the chance of a wrong answer is split
evenly over looks and groups (Bonferroni): over all looks together, it is at most 5%.

A trial writes its question and its looks into the folders of its runs (``trial.json``) and into their store. A later
comparison of those runs with the same metric and margin repeats the same looks and so gives the trial's answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sparsebp_cli import durable
from sparsebp_cli.compare.margin import LEVEL, NotWorse, decide_all
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, paired_difference
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.budget import LARGEST_SMALL, read_bounded

GROWTH = 1.5


def plan_looks(num_seeds: int) -> tuple[int, ...]:
    """Return the numbers of seeds after which to look: growing numbers that end with ``num_seeds``. Raise
    ``UsageError`` below 3 seeds, which can never decide."""
    if num_seeds < FEWEST_PAIRS:
        raise UsageError(f"--until-ci needs at least {FEWEST_PAIRS} seeds to choose from, got {num_seeds}")
    looks = [FEWEST_PAIRS]
    while looks[-1] < num_seeds:
        # Round halves up: Python rounds them to even numbers, so 4.5 would be 4.
        looks.append(min(num_seeds, round(looks[-1] * GROWTH + 0.01)))
    return tuple(looks)


class Trial:
    """The decisions so far. Each group is decided once, at the first look that can."""

    looks: tuple[int, ...]
    level: float
    margin: float
    worse_is_up: bool

    def __init__(self, groups: Sequence[str], num_seeds: int, margin: float, *, worse_is_up: bool) -> None:
        """Fix the looks and the level of each. One or more groups are compared, on at most ``num_seeds`` seeds."""
        self.looks = plan_looks(num_seeds)
        # Split evenly, so that it can be checked by hand. See decision 10.
        self.level = LEVEL / (len(self.looks) * len(groups))
        self.margin, self.worse_is_up = margin, worse_is_up
        self.answers: dict[str, NotWorse | None] = dict.fromkeys(groups)

    @property
    def open(self) -> list[str]:
        """The groups that are not decided."""
        return [group for group, found in self.answers.items() if found is None or found.answer == "inconclusive"]

    def look(self, values: Mapping[str, Mapping[int, float]], baseline: Mapping[int, float]) -> None:
        """Test every undecided group. ``values`` maps each group to seed and quality; ``baseline`` maps the baseline's
        seeds."""
        for group in self.open:
            difference = paired_difference(values.get(group, {}), baseline)
            found = decide_all([difference], self.margin, worse_is_up=self.worse_is_up, level=self.level)[0]
            self.answers[group] = found


@dataclass(frozen=True)
class Looks:
    """The question of a trial, and the looks that it made."""

    metric: str  # the quality metric
    margin: float  # how much worse still counts as not worse
    baseline: str  # group hash
    groups: tuple[str, ...]  # hashes of the groups that are compared with it
    seeds: tuple[int, ...]  # all seeds that it may use, in the order of their runs
    made: tuple[int, ...]  # numbers of seeds after which it looked

    def save(self, run_folder: Path) -> None:
        """Write the file into a run's folder, atomically. A later trial replaces it."""
        file = RunFolder(run_folder).trial_file
        durable.write_file(file, json.dumps(asdict(self)))

    @classmethod
    def load(cls, run_folder: Path) -> Looks | None:
        """Read a run's file; None if it is missing or damaged."""
        try:
            return cls.parse(read_bounded(RunFolder(run_folder).trial_file, LARGEST_SMALL).decode())
        except (OSError, ValueError):
            return None

    @classmethod
    def parse(cls, text: str) -> Looks | None:
        """Parse the text that :meth:`save` wrote, or a store's tag with it; None if it is damaged."""
        try:
            found = json.loads(text)
            return cls(
                str(found["metric"]),
                float(found["margin"]),
                str(found["baseline"]),
                tuple(map(str, found["groups"])),
                tuple(map(int, found["seeds"])),
                tuple(map(int, found["made"])),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def answer(self, values: Mapping[str, Mapping[int, float]], *, worse_is_up: bool) -> dict[str, NotWorse | None]:
        """Repeat the looks on the quality by seed of each group and the baseline, and return each group's answer."""
        trial = Trial(self.groups, len(self.seeds), self.margin, worse_is_up=worse_is_up)
        for count in self.made:
            first = set(self.seeds[:count])
            seen = {group: {s: x for s, x in some.items() if s in first} for group, some in values.items()}
            trial.look(seen, seen.get(self.baseline, {}))
        return {
            group: None if found is None else replace(found, looks=self.made, anytime=found.answer)
            for group, found in trial.answers.items()
        }
