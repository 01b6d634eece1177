"""Which runs repeat each other, and which parameter is their seed: by the recipe, or as the user says.

A run of ours has a recipe, which says both. A run of another program has parameters, of which only the one that is
called ``seed`` (or ``random_seed``) is taken for the seed: ``data_seed`` is often constant, and ``optimizer.state`` is
a treatment. Where a program writes its results and what it calls a run do not make it another treatment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.plan import content_hash

SEEDS = ("seed", "random_seed")  # of other programs
PER_RUN = ("output_dir", "run_name", "logging_dir")  # transformers' callback logs them
OUR_SEED = "training.seed"
NOT_THE_RESULT = ("name", "target.", "tracking.", "checkpoint.")  # of our recipes, as in Plan.group


@dataclass(frozen=True)
class Grouping:
    """What decides which runs form a group.

    Args:
        by: Keys of the recipe that decide alone; empty: all but the seed decide.
        ignore: Keys that do not decide.
        seed: Parameter that is the seed of other programs' runs; empty: ``seed``, else ``random_seed``.
    """

    by: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    seed: str = ""

    @classmethod
    def parse(cls, by: str | None, ignore: str | None, seed: str | None) -> Grouping:
        """Read what the command line says: keys with commas between.

        Args:
            by: Of ``--group-by``.
            ignore: Of ``--ignore``.
            seed: Of ``--seed-param``.

        Returns:
            The grouping.
        """
        keys = [tuple(key.strip() for key in (text or "").split(",") if key.strip()) for text in (by, ignore)]
        return cls(keys[0], keys[1], seed or "")

    def apply(self, runs: Sequence[LoadedRun]) -> list[LoadedRun]:
        """Give every run its group, and those of other programs their seed.

        Args:
            runs: All that are compared.

        Returns:
            Them; a run that changes is a copy.

        Raises:
            UsageError: No run has a key that is named.
        """
        for option, keys in (
            ("--group-by", self.by),
            ("--ignore", self.ignore),
            ("--seed-param", filter(None, [self.seed])),
        ):
            self._check(option, keys, runs)
        return [self._place(run) for run in runs]

    def _check(self, option: str, keys: Iterable[str], runs: Sequence[LoadedRun]) -> None:
        known = dict.fromkeys(key for run in runs for key in run.flat)
        for key in keys:
            if not any(_is_named(path, key) for path in known):
                raise UsageError(f"{option}: no run has {key!r}{did_you_mean(key, list(known))}")

    def _place(self, run: LoadedRun) -> LoadedRun:
        if run.is_ours:
            kept = {k: v for k, v in run.flat.items() if k != OUR_SEED and not k.startswith(NOT_THE_RESULT)}
            return replace(run, group=self._hash(kept)) if self.by or self.ignore else run
        seed = find_seed(run.flat, self.seed)
        kept = {k: v for k, v in run.flat.items() if k not in {seed, "name"} and (k not in PER_RUN or self._names(k))}
        if set(kept) <= {"tracking.experiment"}:  # nothing but its name tells what it is
            kept["name"] = run.name
        return replace(run, seed_key=seed, seed=as_seed(run.flat.get(seed)), group=self._hash(kept))

    def _names(self, path: str) -> bool:
        return any(_is_named(path, key) for key in self.by)

    def _hash(self, flat: Mapping[str, Any]) -> str:
        kept = {k: v for k, v in flat.items() if not any(_is_named(k, key) for key in self.ignore)}
        return content_hash({k: v for k, v in kept.items() if not self.by or self._names(k)})

    def hides(self, run: LoadedRun, path: str) -> bool:
        """Whether a key of a run is no difference to another run: its seed, or what the user or nobody looks at."""
        ignored = (*self.ignore, *(PER_RUN if not run.is_ours and not self._names(path) else ()))
        return path == run.seed_key or any(_is_named(path, key) for key in ignored)

    def find_mixed(self, members: Mapping[str, Sequence[LoadedRun]]) -> list[str]:
        """Return a line a group whose runs differ in what the user said does not matter.

        Args:
            members: Label of a group to its runs.

        Returns:
            The lines; none where the recipe decides.
        """
        if not self.by and not self.ignore:
            return []
        lines = []
        for label, runs in members.items():
            paths = dict.fromkeys(path for run in runs for path in run.flat)
            ignored = {path for run in runs for path in (run.seed_key, "name")} | set(PER_RUN)
            mixed = [p for p in paths if p not in ignored and len({str(run.flat.get(p)) for run in runs}) > 1]
            if mixed:
                more = f" and {len(mixed) - 5} more" if len(mixed) > 5 else ""
                lines.append(
                    f"{label}: its runs differ in {', '.join(mixed[:5])}{more}, passed over by --group-by or --ignore"
                )
        return lines


def find_seed(flat: Mapping[str, Any], named: str = "") -> str:
    """Return the parameter that is the seed of another program's run; empty when none is."""
    return next((key for key in ((named,) if named else SEEDS) if key in flat), "")


def as_seed(value: Any) -> int | None:
    """Return a seed that was logged as text; None for what is no whole number."""
    text = str(value).strip()
    return int(text) if text.removeprefix("-").isdecimal() and len(text) <= 20 else None


def _is_named(path: str, key: str) -> bool:
    """The whole path, its end, or a section of it."""
    return path == key or path.endswith(f".{key}") or path.startswith(f"{key}.")
