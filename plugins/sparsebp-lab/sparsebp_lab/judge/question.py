"""A question, identified by its content only: is this candidate better than this baseline?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan.identity import find_code, find_data
from sparsebp_cli.plan.plan import content_hash, group_content, resolve_paths
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run.metric import Metric
from sparsebp_lab.study.decisive import find_decisive

Equal = Literal["flops", "steps", "command"]
SAME_MEASURE = ("eval_examples", "metric", "generate")  # keys that define what validation measures


class JudgedSide(Protocol):
    """One side of a question."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def digest(self) -> str:
        """Digest of everything that decides its results except the seed; never of a name."""


class Proposal(ABC):
    """A candidate against a baseline."""

    candidate: JudgedSide  # the proposal
    baseline: JudgedSide  # the side that it is compared with
    equal: Equal  # what both may spend equally; "command": one command of each

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The validation metric that decides."""

    @property
    @abstractmethod
    def data(self) -> str | None:
        """Identifier of the test split; None if it cannot be sealed."""

    def check_alike(self) -> None:
        """Raise UsageError if both sides are the same."""
        if self.candidate.digest == self.baseline.digest:
            raise UsageError(
                f"candidate {self.candidate.name} and baseline {self.baseline.name} are identical: change one of them"
            )

    @property
    def sign(self) -> float:
        """Factor that turns the difference candidate minus baseline into a gain."""
        return 1.0 if self.metric.better == "higher" else -1.0

    @cached_property
    def digest(self) -> str:
        """The ledger's key of the question."""
        sides = {"candidate": self.candidate.digest, "baseline": self.baseline.digest}
        return content_hash(sides | {"metric": self.metric.name, "equal": self.equal})

    def seed_key(self, stage: str, number: int) -> Sequence[str | int]:
        """Return what determines the seed of a look. The screen uses the baseline's seeds, so that its runs serve every
        candidate; all other seeds are fresh."""
        return (stage, self.baseline.digest if stage == "screen" else self.digest, number)


@dataclass(frozen=True)
class Contender:
    """A recipe as one side of a question."""

    name: str  # name for people
    recipe: Recipe  # resolved, with absolute paths, without its test split

    @classmethod
    def of(cls, recipe: Recipe, origin: Path) -> Contender:
        """Make a side from a recipe and the file to which its paths are relative."""
        resolved = resolve_paths(recipe, [origin.resolve().parent, Path.cwd()])
        return cls(recipe.name, with_test(resolved, asked=False))

    @cached_property
    def digest(self) -> str:
        """Digest of recipe, code and data, without the seed; never of a name."""
        content = {"group": group_content(self.recipe), "code": find_code(self.recipe), "data": find_data(self.recipe)}
        return content_hash(content)


def with_test(recipe: Recipe, *, asked: bool) -> Recipe:
    """Return a recipe whose runs read the test split (``asked``) or leave it out."""
    return recipe.model_copy(update={"measure": recipe.measure.model_copy(update={"test": asked})})


@dataclass(frozen=True)
class RecipeProposal(Proposal):
    """Two recipes, at equal cost or with the steps of each."""

    candidate: Contender
    baseline: Contender
    equal: Equal = "flops"

    def __post_init__(self) -> None:
        """Raise UsageError if both sides are one recipe, or differ in their validation."""
        self.check_alike()
        if different := [*_find_different(self.candidate.recipe, self.baseline.recipe)]:
            raise UsageError(
                f"candidate and baseline must be validated in the same way: make {', '.join(different)} the same in "
                "both"
            )

    @cached_property
    def metric(self) -> Metric:
        """The validation metric that decides."""
        return find_decisive(self.baseline.recipe)

    @cached_property
    def data(self) -> str | None:
        """Identifier of the test split: the data, however they are split; None without a test split."""
        dataset = self.baseline.recipe.dataset
        if dataset.test_split is None and dataset.test_fraction is None:
            return None
        return content_hash({"name": dataset.name, "content": find_data(self.baseline.recipe).get(dataset.name, "")})


def _find_different(one: Recipe, other: Recipe) -> list[str]:
    here, there = (side.dataset.model_dump(mode="json") for side in (one, other))
    found = [f"dataset.{key}" for key in here if here[key] != there[key]]
    measures = [side.measure.model_dump(mode="json") for side in (one, other)]
    return found + [f"measure.{key}" for key in SAME_MEASURE if measures[0][key] != measures[1][key]]
