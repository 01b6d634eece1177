"""Assign a study's trials to the places that share them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.schema import TargetSection
from sparsebp_cli.recipe.target import named_target_section
from sparsebp_lab.study.loader import LoadedStudy
from sparsebp_lab.study.schema import PlaceSection


@dataclass(frozen=True)
class TrialPlace:
    """A target, and how many trials run there at once."""

    name: str
    section: TargetSection | None  # None: the target of the trial's own recipe
    slots: int = 1

    @property
    def key(self) -> str:
        """Key that identifies the place."""
        return f"{self.name} {'' if self.section is None else self.section.model_dump_json()}"

    def put(self, recipe: Recipe) -> Recipe:
        """Return a recipe that runs here; nothing that affects its result changes."""
        return recipe if self.section is None else recipe.model_copy(update={"target": self.section})


def find_places(loaded: LoadedStudy) -> list[TrialPlace]:
    """Return the places of a study. Raise RecipeError for a target that is unknown, cannot run an arm, or trains with
    another number of processes than the base, which would change the batch size."""
    base = next(iter(loaded.firsts.values())).recipe.target
    if loaded.study.where is None:
        return [TrialPlace(base.kind, None)]
    places = []
    for number, entry in enumerate(loaded.study.where):
        try:
            place = _make_place(entry, base)
            for arm in loaded.study.arms:
                check_place(place, loaded.firsts[arm].recipe)
        except UsageError as error:
            raise loaded.error(("where", number), str(error)) from None
        places.append(place)
    return places


def move(loaded: LoadedStudy, target: str) -> LoadedStudy:
    """Return a study that runs at one place only. Raise UsageError for an unknown or unsuitable target."""
    try:
        section = PlaceSection(target=target)
    except ValidationError:
        raise UsageError(
            f"--target must be a kind of target or a name in targets.yaml, got {shorten(target)!r}"
        ) from None
    moved = loaded.study.model_copy(update={"where": [section]})
    base = next(iter(loaded.firsts.values())).recipe.target
    place = _make_place(section, base)
    for arm in moved.arms:
        check_place(place, loaded.firsts[arm].recipe)
    return replace(loaded, study=moved, options=(*loaded.options, "--target", target))


def check_place(place: TrialPlace, recipe: Recipe) -> None:
    """Raise UsageError if a recipe cannot run at a place."""
    from sparsebp_cli.target import make_target

    moved = place.put(recipe)
    make_target(moved.target).check_plan(Plan(recipe=moved))


def deal(places: Sequence[TrialPlace]) -> Iterator[TrialPlace]:
    """Yield places endlessly, each as often in a round as it has slots."""
    return itertools.cycle([place for place in places for _ in range(place.slots)])


def _make_place(entry: str | PlaceSection, base: TargetSection) -> TrialPlace:
    name, slots = (entry, 1) if isinstance(entry, str) else (entry.target, entry.max_parallel)
    # Use the options of the base's own target, which may differ from the same name in targets.yaml.
    if base.kind == name:
        return TrialPlace(name, None, slots)
    section = named_target_section(name)
    if _processes(section) != _processes(base):
        raise UsageError(
            f"target {name} trains with {_processes(section)} processes, but the base recipe with "
            f"{_processes(base)}; the number changes the batch size, so all targets must have the same number"
        )
    return TrialPlace(name, section, slots)


def _processes(section: TargetSection) -> int:
    return int(section.options.get("processes", 1))
