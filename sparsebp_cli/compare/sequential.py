"""More seeds until a margin is decided, without being fooled by looking often.

Whoever looks after every seed and stops at the first significant one is wrong far more often than 5%. So there are few
looks, fixed before the first (after 3, 5, 8, 12, 18, ... shared seeds), and the chance of a wrong answer is split
evenly over looks and groups (Bonferroni): whatever is decided at whichever look, any wrong answer at all has at most a
chance of 5%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsebp_cli.compare.margin import LEVEL, NotWorse, decide_all
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, paired_difference
from sparsebp_cli.errors import UsageError

GROWTH = 1.5


def plan_looks(num_seeds: int) -> tuple[int, ...]:
    """Return after how many seeds to look.

    Args:
        num_seeds: That there may be at most, at least 3.

    Returns:
        Growing numbers, the last is ``num_seeds``.

    Raises:
        UsageError: Fewer than 3 seeds can never decide.
    """
    if num_seeds < FEWEST_PAIRS:
        raise UsageError(f"--until-ci needs at least {FEWEST_PAIRS} seeds to choose from, got {num_seeds}")
    looks = [FEWEST_PAIRS]
    while looks[-1] < num_seeds:
        looks.append(min(num_seeds, round(looks[-1] * GROWTH + 0.01)))
    return tuple(looks)


class Trial:
    """What is decided so far. Each group is decided once, at the first look that can."""

    def __init__(self, groups: Sequence[str], num_seeds: int, margin: float, *, worse_is_up: bool) -> None:
        """Fix the looks and what each may claim.

        Args:
            groups: That are held against the baseline; at least one.
            num_seeds: That there may be at most.
            margin: How much worse still counts as not worse, above 0.
            worse_is_up: Whether a larger value is a worse one.
        """
        self.looks = plan_looks(num_seeds)
        self.level = LEVEL / (len(self.looks) * len(groups))
        self.margin, self.worse_is_up = margin, worse_is_up
        self.answers: dict[str, NotWorse | None] = dict.fromkeys(groups)

    @property
    def open(self) -> list[str]:
        """Groups that are not decided."""
        return [group for group, found in self.answers.items() if found is None or found.answer == "inconclusive"]

    def look(self, values: Mapping[str, Mapping[int, float]], baseline: Mapping[int, float]) -> None:
        """Take a look at all that is not decided.

        Args:
            values: Of each group, seed to quality.
            baseline: Seed to quality.
        """
        for group in self.open:
            difference = paired_difference(values.get(group, {}), baseline)
            found = decide_all([difference], self.margin, worse_is_up=self.worse_is_up, level=self.level)[0]
            self.answers[group] = found
