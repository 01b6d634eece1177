"""Group runs that repeat each other, and find their seeds, by the recipe or by the user's options.

A run of SparseBP has a recipe with both. A run of another program has parameters, of which only ``seed`` (or
``random_seed``) counts as the seed: ``data_seed`` is often constant, and ``optimizer.state`` is a treatment. The output
folder and the name of a program's run do not distinguish treatments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.plan import content_hash

# See decision 2.
SEEDS = ("seed", "random_seed")  # of other programs
PER_RUN = ("output_dir", "run_name", "logging_dir")  # logged by transformers' callback
OUR_SEED = "training.seed"
NOT_THE_RESULT = ("name", "target.", "tracking.", "checkpoint.")  # keys of our recipes, as in Plan.group


@dataclass(frozen=True)
class Grouping:
    """The keys that decide which runs form a group."""

    ignore: tuple[str, ...] = ()  # keys that do not decide
    seed: str = ""  # seed parameter of other programs' runs; empty: ``seed``, else ``random_seed``

    @classmethod
    def parse(cls, ignore: str | None, seed: str | None) -> Grouping:
        """Parse the comma-separated keys of ``--ignore``, and the key of ``--seed-param``."""
        return cls(tuple(key.strip() for key in (ignore or "").split(",") if key.strip()), seed or "")

    def apply(self, runs: Sequence[LoadedRun]) -> list[LoadedRun]:
        """Set every run's group, and the seed of other programs' runs. Changed runs are copies. Raise ``UsageError`` if
        no run has a named key."""
        self._check("--ignore", self.ignore, runs)
        self._check("--seed-param", filter(None, [self.seed]), runs)
        return [self._place(run) for run in runs]

    def _check(self, option: str, keys: Iterable[str], runs: Sequence[LoadedRun]) -> None:
        known = dict.fromkeys(key for run in runs for key in run.flat)
        for key in keys:
            if not any(_is_named(path, key) for path in known):
                raise UsageError(f"{option}: no run has the key {key!r}{did_you_mean(key, list(known))}")

    def _place(self, run: LoadedRun) -> LoadedRun:
        if run.is_ours:
            kept = {k: v for k, v in run.flat.items() if k != OUR_SEED and not k.startswith(NOT_THE_RESULT)}
            return replace(run, group=self._hash(kept)) if self.ignore else run
        seed = find_seed(run.flat, self.seed)
        kept = {k: v for k, v in run.flat.items() if k not in {seed, "name", *PER_RUN}}
        if set(kept) <= {"tracking.experiment"}:  # only its name identifies it
            kept["name"] = run.name
        return replace(run, seed_key=seed, seed=as_seed(run.flat.get(seed)), group=self._hash(kept))

    def _hash(self, flat: Mapping[str, object]) -> str:
        return content_hash({k: v for k, v in flat.items() if not any(_is_named(k, key) for key in self.ignore)})

    def hides(self, run: LoadedRun, path: str) -> bool:
        """Return whether a key of a run is the seed or is ignored, so that it does not distinguish runs."""
        ignored = (*self.ignore, *(() if run.is_ours else PER_RUN))
        return path == run.seed_key or any(_is_named(path, key) for key in ignored)

    def find_mixed(self, members: Mapping[str, Sequence[LoadedRun]]) -> list[str]:
        """Return a line for each group, by label, whose runs differ in keys that the user chose to ignore."""
        if not self.ignore:
            return []
        lines = []
        for label, runs in members.items():
            paths = dict.fromkeys(path for run in runs for path in run.flat)
            ignored = {path for run in runs for path in (run.seed_key, "name")} | set(PER_RUN)
            mixed = [p for p in paths if p not in ignored and len({str(run.flat.get(p)) for run in runs}) > 1]
            if mixed:
                more = f" and {len(mixed) - 5} more" if len(mixed) > 5 else ""
                lines.append(f"{label}: its runs differ in {', '.join(mixed[:5])}{more}, which --ignore leaves out")
        return lines


def find_seed(flat: Mapping[str, object], named: str = "") -> str:
    """Return the seed parameter of another program's run; empty if there is none."""
    return next((key for key in ((named,) if named else SEEDS) if key in flat), "")


def as_seed(value: object) -> int | None:
    """Parse a seed that was logged as text; None unless it is a whole number."""
    text = str(value).strip()
    return int(text) if text.removeprefix("-").isdecimal() and len(text) <= 20 else None


def _is_named(path: str, key: str) -> bool:
    """Return whether a key is the whole path, its end, or a section of it."""
    return path == key or path.endswith(f".{key}") or path.startswith(f"{key}.")
