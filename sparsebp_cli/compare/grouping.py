"""Group runs that repeat each other: by their recipes, or by the user's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.plan import content_hash

SEED = "training.seed"
NOT_THE_RESULT = ("name", "target.", "tracking.", "checkpoint.")  # keys of recipes, as in Plan.group


@dataclass(frozen=True)
class Grouping:
    """The keys that decide which runs form a group."""

    ignore: tuple[str, ...] = ()  # keys that do not decide

    @classmethod
    def parse(cls, ignore: str | None) -> Grouping:
        """Parse the comma-separated keys of ``--ignore``."""
        return cls(tuple(key.strip() for key in (ignore or "").split(",") if key.strip()))

    def apply(self, runs: Sequence[LoadedRun]) -> list[LoadedRun]:
        """Set every run's group. Changed runs are copies. Raise ``UsageError`` if no run has a named key."""
        self._check("--ignore", self.ignore, runs)
        return [replace(run, group=self._hash(run)) for run in runs] if self.ignore else list(runs)

    def _check(self, option: str, keys: Iterable[str], runs: Sequence[LoadedRun]) -> None:
        known = dict.fromkeys(key for run in runs for key in run.flat)
        for key in keys:
            if not any(_is_named(path, key) for path in known):
                raise UsageError(f"{option}: no run has the key {key!r}{did_you_mean(key, list(known))}")

    def _hash(self, run: LoadedRun) -> str:
        return content_hash(
            {k: v for k, v in run.flat.items() if not k.startswith(NOT_THE_RESULT) and not self.hides(k)}
        )

    def hides(self, path: str) -> bool:
        """Return whether a key is the seed or is ignored, so that it does not distinguish runs."""
        return path == SEED or any(_is_named(path, key) for key in self.ignore)

    def find_mixed(self, members: Mapping[str, Sequence[LoadedRun]]) -> list[str]:
        """Return a line for each group, by label, whose runs differ in keys that the user chose to ignore."""
        if not self.ignore:
            return []
        lines = []
        for label, runs in members.items():
            paths = [path for path in dict.fromkeys(path for run in runs for path in run.flat) if path != SEED]
            mixed = [p for p in paths if p != "name" and len({str(run.flat.get(p)) for run in runs}) > 1]
            if mixed:
                more = f" and {len(mixed) - 5} more" if len(mixed) > 5 else ""
                lines.append(f"{label}: its runs differ in {', '.join(mixed[:5])}{more}, which --ignore leaves out")
        return lines


def _is_named(path: str, key: str) -> bool:
    """Return whether a key is the whole path, its end, or a section of it."""
    return path == key or path.endswith(f".{key}") or path.startswith(f"{key}.")
