"""``sparsebp validate`` of a study: every arm, and the small study that its key ``scale`` describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.study.loader import LoadedStudy


def describe_study(file: Path, changes: list[str]) -> Iterator[str]:
    """Yield lines on a study and on its small form, both checked. Raise UsageError for what is wrong."""
    from sparsebp_cli.study.loader import load_study

    if changes:
        raise UsageError(f"--set is for recipes, and {file} is a study: change it there; --scaled runs it small")
    whole = load_study(file)
    yield from _describe(whole, f"ok {file}")
    if whole.study.scale is not None:
        yield from _describe(load_study(file, scaled=True), f"ok {file} --scaled")


def make_plans(file: Path) -> list[Plan]:
    """Return a plan for each arm of a study, with its first combination, in the order of the file."""
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.study.loader import load_study

    loaded = load_study(file)
    return [make_plan(loaded.firsts[arm].recipe, file) for arm in loaded.study.arms]


def _describe(loaded: LoadedStudy, begin: str) -> Iterator[str]:
    from sparsebp_cli.cli.validate import check_sources

    unknown: dict[str, None] = {}
    for arm in loaded.study.arms:
        unknown |= dict.fromkeys(check_sources(loaded.firsts[arm].placed, loaded.folders))
    first = next(iter(loaded.firsts.values())).recipe
    model = first.model.name or f"random {(first.model.config or {}).get('model_type')}"
    yield (
        f"{begin}: {loaded.study.study}: {', '.join(loaded.study.arms)}; model {model}, data {first.dataset.name}, "
        f"{first.training.max_steps} steps, seeds {', '.join(map(str, loaded.study.seeds.report))}"
    )
    yield from (f"   not known from here: {text}" for text in unknown)
