"""Choose the runs to compare, by words that name them and by a condition.

Runs on disk are listed once, from their ``plan.json`` alone. An event log is read only for a condition on the state or
on a metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sparsebp_cli.compare.expression import Condition, parse
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import POLICY_KEY, SEED, LoadedRun, flatten
from sparsebp_cli.errors import RunNotFoundError, UsageError, did_you_mean
from sparsebp_cli.run import RunFolder, home
from sparsebp_cli.run.folder import find_folder, list_folders, match_word
from sparsebp_cli.run.label import Labels
from sparsebp_cli.run.metric import METRICS

T = TypeVar("T")
TAG = ("tag.", "tags.")
OUTSIDE = ("name", SEED, "target.", "tracking.", "checkpoint.")  # recipe keys outside the group


@dataclass
class RunCandidate:
    """A run that can be chosen."""

    folder: RunFolder  # where it is
    name: str = ""  # its name in tables; empty if its plan cannot be read
    created: float = 0.0  # seconds since 1970
    recipe: Mapping[str, object] = field(default_factory=dict)  # the stored recipe
    tags: Mapping[str, str] = field(default_factory=dict)  # tags of its recipe

    @property
    def run_id(self) -> str:
        """Its id."""
        return self.folder.run_id

    @cached_property
    def loaded(self) -> LoadedRun:
        """The loaded run, read only once. Raise ``RunNotFoundError`` without a readable plan."""
        return load_folder(self.folder)

    @cached_property
    def labels(self) -> Labels:
        """The users' labels of the run."""
        return Labels.load(self.folder.path)

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The recipe by dotted path."""
        return flatten(self.recipe)

    def find(self, name: str) -> Sequence[object]:
        """Return every value of a name in this run; empty if there is none."""
        if name in SPECIAL:
            return SPECIAL[name](self)
        if name.startswith(TAG):
            tag = name.partition(".")[2]
            return [self.tags[tag]] if tag in self.tags else []
        return self.named(name) or ([] if "/" not in name else self.read(lambda loaded: loaded.history.last(name)))

    def named(self, name: str) -> list[object]:
        """Return the values of every key of the recipe whose path ends in a name."""
        return [value for key, value in self.flat.items() if key == name or key.endswith(f".{name}")]

    def read(self, what: Callable[[LoadedRun], T | None]) -> list[T]:
        """Read the run and return ``what`` of it in a list; empty if its plan cannot be read."""
        try:
            found = what(self.loaded)
        except RunNotFoundError:
            return []
        return [] if found is None else [found]


SPECIAL: dict[str, Callable[[RunCandidate], Sequence[object]]] = {
    "id": lambda run: [run.run_id],
    "name": lambda run: [run.name] if run.name else [],
    "created": lambda run: [run.created] if run.created else [],
    "state": lambda run: run.read(lambda loaded: str(loaded.state)),
    "seed": lambda run: [run.flat[SEED]] if SEED in run.flat else [],
    "policy": lambda run: [v for key, v in run.flat.items() if key.startswith(POLICY_KEY) and key.endswith(".name")],
    "tag": lambda run: list(run.labels.tags),
    "note": lambda run: [run.labels.note] if run.labels.note else [],
    "experiment": lambda run: run.named("tracking.experiment"),
}


def local_candidates(folder: Path | None = None) -> list[RunCandidate]:
    """Return every run in a folder, newest first; None means this machine's runs. The folder may contain run folders,
    be a run folder, or be another machine's ``$SPARSEBP_HOME``. Runs with damaged plans come last, with only their ids.
    """
    root = home() if folder is None else folder
    root = root / "runs" if (root / "runs").is_dir() else root
    folders = [root] if (root / "plan.json").is_file() else list_folders(root)
    found = [_describe(RunFolder(path.absolute())) for path in folders]
    return sorted(found, key=lambda candidate: (candidate.created, candidate.run_id), reverse=True)


def choose(
    candidates: Sequence[RunCandidate], words: Iterable[str], where: str | None, place: str
) -> list[RunCandidate]:
    """Return the runs that the words name and that meet the condition, without duplicates, in the order of the words.

    ``candidates`` are all runs, newest first. A word is an id, its beginning (3 digits or more), a name (all its runs,
    oldest first), ``@last``, ``@N`` (the newest N), ``@TAG``, ``TAG=VALUE``, or a run's folder. Without words, all runs
    are chosen. ``where`` is a condition over recipe, state, tags and metrics. ``place`` names the candidates' origin in
    errors.

    Raise ``RunNotFoundError`` if a word names nothing or no run meets the condition. Raise ``UsageError`` if the
    condition cannot be read or needs a name that no run has.
    """
    found: dict[str, RunCandidate] = {}
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
        raise RunNotFoundError(f"none of {len(chosen)} runs meets the condition --where {where!r}")
    return kept


def load_all(candidates: Sequence[RunCandidate]) -> tuple[list[LoadedRun], list[str]]:
    """Read the chosen runs. Return those that can be read, and a line for each other run. Raise ``RunNotFoundError`` if
    none can be read."""
    loaded, problems = list[LoadedRun](), dict[str, RunNotFoundError]()
    for candidate in candidates:
        try:
            loaded.append(candidate.loaded)
        except RunNotFoundError as error:
            problems[candidate.run_id] = error
    if problems and not loaded:
        raise RunNotFoundError("; ".join(f"run {run_id} cannot be read: {error}" for run_id, error in problems.items()))
    return loaded, [f"run {run_id} is left out: {error}" for run_id, error in problems.items()]


def describe_left_out(candidates: Sequence[RunCandidate], chosen: Sequence[RunCandidate]) -> list[str]:
    """Return a line for each chosen name if some of its seeds were not chosen: the chosen ones may be the best."""
    taken: dict[tuple[tuple[str, str], ...], list[RunCandidate]] = {}
    for candidate in chosen:
        taken.setdefault(_without_seed(candidate), []).append(candidate)
    seeds = {key: {str(seed) for one in some for seed in one.find("seed")} for key, some in taken.items()}
    ids, left = {candidate.run_id for candidate in chosen}, dict[str, dict[str, None]]()
    for candidate in candidates:
        some = taken.get(key := _without_seed(candidate), [])
        if some and candidate.run_id not in ids:
            new = [str(seed) for seed in candidate.find("seed") if str(seed) not in seeds[key]]
            left.setdefault(some[0].name, {}).update(dict.fromkeys(new))
    return [
        f"{name}: more seeds are stored than you selected; the numbers here leave out seeds {', '.join(sorted(found))}"
        for name, found in left.items()
        if found
    ]


def _without_seed(candidate: RunCandidate) -> tuple[tuple[str, str], ...]:
    """Return the part of a recipe that defines its group, with its experiment: equal parameters in another experiment
    are another question."""
    flat = candidate.flat.items()
    kept = sorted((key, str(value)) for key, value in flat if not key.startswith(OUTSIDE))
    return (*kept, *(("experiment", str(name)) for name in candidate.find("experiment")))


def find_outcomes(where: str) -> list[str]:
    """Return the metrics and ``state`` in a condition: choosing by them keeps survivors or winners."""
    mentioned = dict.fromkeys(parse(where, "--where").names)
    return [name for name in mentioned if name == "state" or ("/" in name and not name.startswith(TAG))]


def _named(candidates: Sequence[RunCandidate], word: str, place: str) -> list[RunCandidate]:
    if not word.startswith("@") and (folder := find_folder(word)) is not None:
        return [_describe(folder)]
    tag, equals, value = word.partition("=")
    if equals and (tagged := [candidate for candidate in candidates if candidate.tags.get(tag) == value]):
        return tagged[::-1]
    return match_word(word, candidates, lambda candidate: candidate.folder, lambda candidate: candidate.name, place)


def _check_names(condition: Condition, candidates: Sequence[RunCandidate]) -> None:
    for name in condition.names:
        if name in SPECIAL or any(candidate.find(name) for candidate in candidates):
            continue
        raise UsageError(
            f"--where: no run has {name!r}; use a key of the recipe, {', '.join(SPECIAL)}, tag.NAME or a metric"
            f"{suggest_name(name, candidates)}"
        )


def suggest_name(name: str, candidates: Sequence[RunCandidate], others: Iterable[str] = ()) -> str:
    """Return ``; did you mean X?`` for the nearest name in the candidates' conditions or ``others``; empty if none is
    near. ``loss`` means the validation loss."""
    if f"eval/{name}" in METRICS:
        return f"; did you mean eval/{name}?"
    keys = {key for candidate in candidates for key in candidate.flat}
    return did_you_mean(name, [*others, *SPECIAL, *METRICS, *keys, *{key.rpartition(".")[2] for key in keys}])


def _describe(run: RunFolder) -> RunCandidate:
    try:
        plan = run.read_plan()
    except RunNotFoundError:
        return RunCandidate(run)  # load_folder raises the error
    recipe = plan["recipe"]
    tags = (recipe.get("tracking") or {}).get("tags") or {}
    return RunCandidate(run, recipe["name"], float(plan["created"]), recipe, dict(tags))
