"""``sparsebp validate`` for a study: check every arm, and the small study of its key ``scale``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.cli.answer.recipe_record import CheckedStudy
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from sparsebp_cli.recipe import PlacedRecipe

    Look = Callable[[PlacedRecipe, Sequence[Path]], list[str]]
    from sparsebp_cli.plan import Plan
    from sparsebp_lab.study.loader import LoadedStudy


def check_study(file: Path, changes: list[str], look: Look) -> Iterator[CheckedStudy]:
    """Yield a study and its small form, both checked. Raise UsageError for an error. ``look`` checks the files that a
    recipe names, and returns what it cannot check."""
    from sparsebp_lab.study.loader import load_study

    if changes:
        what = f"{file} is a study: edit the file; --scaled runs a small version of it"
        raise UsageError(f"--set works only with recipes, but {what}")
    whole = load_study(file)
    yield _check(whole, file, look)
    if whole.study.scale is not None:
        yield _check(load_study(file, scaled=True), file, look, is_scaled=True)


def describe(found: CheckedStudy) -> Iterator[str]:
    """Yield the lines about a checked study."""
    yield (
        f"ok {found.file}{' --scaled' * found.is_scaled}: {found.study}: {', '.join(found.arms)}; model {found.model}, "
        f"data {found.dataset}, {found.max_steps} steps, seeds {', '.join(map(str, found.seeds))}"
    )
    yield from (f"   not checked here: {text}" for text in found.unknown)


def make_plans(file: Path) -> list[Plan]:
    """Return a plan for each arm of a study, with its first combination, in the order of the file."""
    from sparsebp_cli.plan import make_plan
    from sparsebp_lab.study.loader import load_study

    loaded = load_study(file)
    return [make_plan(loaded.firsts[arm].recipe, file) for arm in loaded.study.arms]


def _check(loaded: LoadedStudy, file: Path, look: Look, *, is_scaled: bool = False) -> CheckedStudy:
    unknown: dict[str, None] = {}
    for arm in loaded.study.arms:
        unknown |= dict.fromkeys(look(loaded.firsts[arm].placed, loaded.folders))
    first = next(iter(loaded.firsts.values())).recipe
    return CheckedStudy(
        file=str(file),
        is_scaled=is_scaled,
        study=loaded.study.study,
        arms=list(loaded.study.arms),
        model=first.model.name or f"random {(first.model.config or {}).get('model_type')}",
        dataset=first.dataset.name,
        max_steps=first.training.max_steps,
        seeds=list(loaded.study.seeds.report),
        unknown=list(unknown),
    )
