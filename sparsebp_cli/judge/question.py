"""A question: is this candidate better than this baseline? It is known by its content alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan.identity import find_code, find_data
from sparsebp_cli.plan.plan import content_hash, group_content, resolve_paths
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.evaluation import find_decisive
from sparsebp_cli.run.metric import Metric

Equal = Literal["flops", "steps"]
SAME_MEASURE = ("eval_examples", "eval_batches", "metric", "generate")  # keys that decide what validation measures


@dataclass(frozen=True)
class Contender:
    """One side of a question."""

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
class Proposal:
    """A candidate against a baseline, at an equal price or with the steps of each recipe."""

    candidate: Contender
    baseline: Contender
    equal: Equal = "flops"

    def __post_init__(self) -> None:
        """Refuse sides that are one recipe, or whose validation is not the same. Raises UsageError."""
        if self.candidate.digest == self.baseline.digest:
            raise UsageError(
                f"candidate {self.candidate.name} and baseline {self.baseline.name} train the same: change a key of one"
            )
        if different := [*_find_different(self.candidate.recipe, self.baseline.recipe)]:
            raise UsageError(
                f"candidate and baseline are not validated alike: {', '.join(different)} differ; give both the same"
            )

    @cached_property
    def metric(self) -> Metric:
        """The validation metric that decides."""
        return find_decisive(self.baseline.recipe)

    @property
    def sign(self) -> float:
        """What a difference, candidate minus baseline, is multiplied by to be a gain."""
        return 1.0 if self.metric.better == "higher" else -1.0

    @cached_property
    def digest(self) -> str:
        """What the ledger knows the question by."""
        sides = {"candidate": self.candidate.digest, "baseline": self.baseline.digest}
        return content_hash(sides | {"metric": self.metric.name, "equal": self.equal})

    @cached_property
    def data(self) -> str:
        """What the test split is known by: the data, however they are split."""
        name = self.baseline.recipe.dataset.name
        return content_hash({"name": name, "content": find_data(self.baseline.recipe).get(name, "")})

    def seed_key(self, stage: str, number: int) -> Sequence[str | int]:
        """Return what the seed of a look follows from. The screen has the baseline's, so that its runs serve every
        candidate; all others are fresh."""
        return (stage, self.baseline.digest if stage == "screen" else self.digest, number)


def _find_different(one: Recipe, other: Recipe) -> list[str]:
    here, there = (side.dataset.model_dump(mode="json") for side in (one, other))
    found = [f"dataset.{key}" for key in here if here[key] != there[key]]
    measures = [side.measure.model_dump(mode="json") for side in (one, other)]
    return found + [f"measure.{key}" for key in SAME_MEASURE if measures[0][key] != measures[1][key]]
