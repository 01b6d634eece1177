"""Which runs are compared: words that name them, and a condition that they meet.

Runs on disk are listed once and described by their ``plan.json`` alone; a journal is read when a condition asks for the
state or for a metric.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsebp_cli.compare.expression import Condition, names, parse
from sparsebp_cli.compare.grouping import OUR_SEED, find_seed
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun, flatten
from sparsebp_cli.errors import RunNotFoundError, UsageError, did_you_mean
from sparsebp_cli.run import RunFolder, home
from sparsebp_cli.run.folder import SHORTEST_PREFIX

TAG = ("tag.", "tags.")
OUTSIDE = ("training.seed", "seed", "target.", "tracking.", "checkpoint.")  # of a recipe, what decides no group


@dataclass
class Candidate:
    """A run that may be chosen.

    Args:
        run_id: Its id.
        name: What it is called.
        created: Seconds since 1970.
        recipe: The recipe as it is stored; of somebody else's run, its parameters.
        tags: Those of its recipe or of the store.
        load: Reads it.
        other_id: A second id: that of the store.
        metrics: Last values; None: they are in its journal.
        known_state: As the store says; empty: the journal tells.
        place: The store; empty: a folder.
    """

    run_id: str
    name: str
    created: float
    recipe: dict[str, Any]
    tags: Mapping[str, str]
    load: Callable[[], LoadedRun]
    other_id: str = ""
    metrics: Mapping[str, float] | None = None
    known_state: str = ""
    place: str = ""

    @cached_property
    def loaded(self) -> LoadedRun:
        """The run, read once."""
        return self.load()

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The recipe by dotted path."""
        return flatten(self.recipe)

    def find(self, name: str) -> Sequence[Any]:
        """Return every value that a name has in this run; none: it has no such thing."""
        if name in SPECIAL:
            return SPECIAL[name](self)
        if name.startswith(TAG):
            tag = name.partition(".")[2]
            return [self.tags[tag]] if tag in self.tags else []
        return self.named(name) or ([] if "/" not in name else self._metric(name))

    def named(self, name: str) -> list[Any]:
        """Return the values of every key of the recipe whose path ends in a name."""
        return [value for key, value in self.flat.items() if key == name or key.endswith(f".{name}")]

    def _metric(self, name: str) -> list[float]:
        if self.metrics is not None:
            return [self.metrics[name]] if name in self.metrics else []
        return self.ask(lambda loaded: loaded.history.last(name))

    def ask(self, what: Callable[[LoadedRun], Any]) -> list[Any]:
        """Return what the run says once it is read; a run whose plan cannot be read says nothing."""
        try:
            told = what(self.loaded)
        except RunNotFoundError:
            return []
        return [] if told is None else [told]


SPECIAL: dict[str, Callable[[Candidate], Sequence[Any]]] = {
    "id": lambda run: [run.run_id, *([run.other_id] if run.other_id else [])],
    "name": lambda run: [run.name] if run.name else [],
    "created": lambda run: [run.created] if run.created else [],
    "state": lambda run: [run.known_state] if run.known_state else run.ask(lambda loaded: str(loaded.state)),
    "seed": lambda run: [run.flat[key] for key in (OUR_SEED, find_seed(run.flat)) if key in run.flat][:1],
    "policy": lambda run: [v for key, v in run.flat.items() if key.startswith("policy.") and key.endswith(".name")],
    "experiment": lambda run: run.named("tracking.experiment"),
}


def local_candidates(folder: Path | None = None) -> list[Candidate]:
    """Return every run in a folder, newest first; one whose plan is damaged comes last, and only its id is known.

    Args:
        folder: That holds run folders, or is one, or is another machine's ``$SPARSEBP_HOME``; None: this machine's own.

    Returns:
        The runs.
    """
    root = home() if folder is None else folder
    root = root / "runs" if (root / "runs").is_dir() else root
    plans = [root / "plan.json"] if (root / "plan.json").is_file() else root.glob("*/plan.json")
    found = [_describe(RunFolder(plan.parent.absolute())) for plan in plans]
    return sorted(found, key=lambda candidate: (candidate.created, candidate.run_id), reverse=True)


def choose(candidates: Sequence[Candidate], words: Iterable[str], where: str | None, place: str) -> list[Candidate]:
    """Return the runs that the words name, and of them those that meet the condition.

    Args:
        candidates: All runs, newest first.
        words: An id, the beginning of one (3 digits or more), a name (all its runs), ``@last``, ``@N`` (the newest N),
            ``TAG=VALUE``, or a run's folder; none: all runs.
        where: A condition over the recipe, state, tags and metrics; None: no condition.
        place: Where the candidates are from, for errors.

    Returns:
        Each once, in the order of the words; of a name the oldest first.

    Raises:
        RunNotFoundError: A word names nothing, or nothing meets the condition.
        UsageError: The condition cannot be read, or asks for what no run has.
    """
    found: dict[str, Candidate] = {}
    listed = list(words)
    for word in listed:
        for candidate in _named(candidates, word, place):
            found.setdefault(candidate.run_id, candidate)
    chosen = list(found.values()) if listed else list(candidates)[::-1]
    if where is None:
        return chosen
    condition = parse(where, "--where")
    _check_names(condition, chosen)
    kept = [candidate for candidate in chosen if condition.holds(candidate.find)]
    if not kept:
        raise RunNotFoundError(f"none of {len(chosen)} runs meets --where {where!r}")
    return kept


def tell_left_out(candidates: Sequence[Candidate], chosen: Sequence[Candidate]) -> list[str]:
    """Return which seeds of the chosen runs' recipes were not chosen, a line a name: those chosen may be the best."""
    taken: dict[tuple[tuple[str, str], ...], list[Candidate]] = {}
    for candidate in chosen:
        taken.setdefault(_without_seed(candidate), []).append(candidate)
    ids, left = {candidate.run_id for candidate in chosen}, dict[str, dict[str, None]]()
    for candidate in candidates:
        some = taken.get(_without_seed(candidate), [])
        seeds = {str(seed) for one in some for seed in one.find("seed")}
        if some and candidate.run_id not in ids:
            new = [str(seed) for seed in candidate.find("seed") if str(seed) not in seeds]
            left.setdefault(some[0].name, {}).update(dict.fromkeys(new))
    return [
        f"{name}: seeds that are there were not chosen, and are in no number here: {', '.join(sorted(seeds))}"
        for name, seeds in left.items()
        if seeds
    ]


def _without_seed(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """What decides the group, as far as a recipe alone tells."""
    flat = candidate.flat.items()
    return tuple(sorted((key, str(value)) for key, value in flat if not key.startswith(OUTSIDE) and key != "name"))


def find_outcomes(where: str) -> list[str]:
    """Return what a condition asks of how runs ended: whoever chooses by it keeps survivors or winners.

    Args:
        where: A condition that can be read.

    Returns:
        Metrics and ``state``, each once.
    """
    asked = dict.fromkeys(names(parse(where, "--where")))
    return [name for name in asked if name == "state" or ("/" in name and not name.startswith(TAG))]


def _named(candidates: Sequence[Candidate], word: str, place: str) -> list[Candidate]:
    if word.startswith("@"):
        count = "1" if word == "@last" else word[1:]
        if not count.isdecimal() or not 0 < int(count) <= len(candidates):
            raise RunNotFoundError(
                f"{word}: there are {len(candidates)} runs; use @last or @N with N from 1 to {len(candidates)}"
            )
        return list(candidates[: int(count)])[::-1]
    if os.sep in word and (Path(word) / "plan.json").is_file():
        return [_describe(RunFolder(Path(word).absolute()))]
    if "=" in word:
        tag, _, value = word.partition("=")
        if tagged := [c for c in candidates if c.tags.get(tag) == value]:
            return tagged[::-1]
    for matching in (
        [c for c in candidates if word in {c.run_id, c.other_id}],
        [c for c in candidates if c.name == word],
    ):
        if matching:
            return matching[::-1]
    prefixed = [c for c in candidates if len(word) >= SHORTEST_PREFIX and c.run_id.startswith(word)]
    if len(prefixed) == 1:
        return prefixed
    if prefixed:
        raise RunNotFoundError(f"{word} is not unique: {', '.join(c.run_id for c in prefixed[:5])}")
    near = did_you_mean(word, [c.run_id for c in candidates] + [c.name for c in candidates if c.name])
    raise RunNotFoundError(f"no run answers to {word!r} in {place}{near}; `sparsebp runs` lists those of this machine")


def _check_names(condition: Condition, candidates: Sequence[Candidate]) -> None:
    for name in names(condition):
        if name in SPECIAL or any(candidate.find(name) for candidate in candidates):
            continue
        keys = {key for candidate in candidates for key in candidate.flat}
        known = [*SPECIAL, *keys, *{key.rpartition(".")[2] for key in keys}]
        raise UsageError(
            f"--where: no run has {name!r}; use a key of the recipe, {', '.join(SPECIAL)}, tag.NAME or a metric"
            f"{did_you_mean(name, known)}"
        )


def _describe(run: RunFolder) -> Candidate:
    try:
        plan = json.loads(run.plan_file.read_bytes())
        recipe = plan["recipe"]
        tags = recipe.get("tracking", {}).get("tags") or {}
        return Candidate(
            run.run_id, str(recipe["name"]), float(plan["created"]), recipe, dict(tags), lambda: load_folder(run)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Candidate(run.run_id, "", 0.0, {}, {}, lambda: load_folder(run))  # which says what is wrong
