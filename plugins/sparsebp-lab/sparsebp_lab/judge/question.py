"""A question: is this candidate better than this baseline? It is known by its content alone."""

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
from sparsebp_cli.recipe.evaluation import find_decisive
from sparsebp_cli.run.metric import Metric

Equal = Literal["flops", "steps", "command"]
SAME_MEASURE = ("eval_examples", "eval_batches", "metric", "generate")  # keys that decide what validation measures


class Side(Protocol):
    """One side of a question."""

    @property
    def name(self) -> str:
        """As people know it."""

    @property
    def digest(self) -> str:
        """What decides its results, but for the seed; never a name."""


class Proposal(ABC):
    """A candidate against a baseline."""

    candidate: Side  # what is proposed
    baseline: Side  # what it is held against
    equal: Equal  # what both may spend as much of; "command": what one command of each spends

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The validation metric that decides."""

    @property
    @abstractmethod
    def data(self) -> str | None:
        """What the test split is known by; None where it cannot be sealed."""

    def check_alike(self) -> None:
        """Refuse two sides that are the same. Raises UsageError."""
        if self.candidate.digest == self.baseline.digest:
            raise UsageError(
                f"candidate {self.candidate.name} and baseline {self.baseline.name} train the same: change one of them"
            )

    @property
    def sign(self) -> float:
        """What a difference, candidate minus baseline, is multiplied by to be a gain."""
        return 1.0 if self.metric.better == "higher" else -1.0

    @cached_property
    def digest(self) -> str:
        """What the ledger knows the question by."""
        sides = {"candidate": self.candidate.digest, "baseline": self.baseline.digest}
        return content_hash(sides | {"metric": self.metric.name, "equal": self.equal})

    def seed_key(self, stage: str, number: int) -> Sequence[str | int]:
        """Return what the seed of a look follows from. The screen has the baseline's, so that its runs serve every
        candidate; all others are fresh."""
        return (stage, self.baseline.digest if stage == "screen" else self.digest, number)


@dataclass(frozen=True)
class Contender:
    """A recipe as one side of a question."""

    name: str  # as people know it
    recipe: Recipe  # resolved, with absolute paths; its test split is set aside

    @classmethod
    def of(cls, recipe: Recipe, origin: Path) -> Contender:
        """Make a side from a recipe and the file that its relative paths start from."""
        resolved = resolve_paths(recipe, [origin.resolve().parent, Path.cwd()])
        return cls(recipe.name, with_test(resolved, asked=False))

    @cached_property
    def digest(self) -> str:
        """What decides its results, but for the seed: recipe, code and data; never a name."""
        content = {"group": group_content(self.recipe), "code": find_code(self.recipe), "data": find_data(self.recipe)}
        return content_hash(content)


def with_test(recipe: Recipe, *, asked: bool) -> Recipe:
    """Return a recipe whose runs read the test split, or set it aside."""
    return recipe.model_copy(update={"measure": recipe.measure.model_copy(update={"test": asked})})


@dataclass(frozen=True)
class RecipeProposal(Proposal):
    """Two recipes, at an equal price or with the steps of each."""

    candidate: Contender
    baseline: Contender
    equal: Equal = "flops"

    def __post_init__(self) -> None:
        """Refuse sides that are one recipe, or whose validation is not the same. Raises UsageError."""
        self.check_alike()
        if different := [*_find_different(self.candidate.recipe, self.baseline.recipe)]:
            raise UsageError(
                f"candidate and baseline are not validated alike: {', '.join(different)} differ; give both the same"
            )

    @cached_property
    def metric(self) -> Metric:
        """The validation metric that decides."""
        return find_decisive(self.baseline.recipe)

    @cached_property
    def data(self) -> str | None:
        """What the test split is known by: the data, however they are split; None if there is no test split."""
        dataset = self.baseline.recipe.dataset
        if dataset.test_split is None and dataset.test_fraction is None:
            return None
        return content_hash({"name": dataset.name, "content": find_data(self.baseline.recipe).get(dataset.name, "")})


def _find_different(one: Recipe, other: Recipe) -> list[str]:
    here, there = (side.dataset.model_dump(mode="json") for side in (one, other))
    found = [f"dataset.{key}" for key in here if here[key] != there[key]]
    measures = [side.measure.model_dump(mode="json") for side in (one, other)]
    return found + [f"measure.{key}" for key in SAME_MEASURE if measures[0][key] != measures[1][key]]
