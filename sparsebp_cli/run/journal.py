"""The journal: one append-only file of JSON lines, the truth of a run. Everything else is derived from it.

Records, each with ``kind``, ``attempt`` (from 1) and ``time`` (seconds since 1970):

    attempt   a worker started: ``from_step``, ``environment``
    metrics   ``step`` (1 after the first optimizer step, 0 before), ``values``
    facts     ``values``: what is known once per run, such as the dataset's digest
    layers    ``step``, ``values``: layer or site to its figures (``kept_share``, ``cosine``, ...; null where not known)
    proof     ``step``, ``values``: ``columns``, and ``modules``: module to its row, in a step's backward; not written
              again as long as nothing changes
    memory    ``step``, ``values``: ``columns`` and ``points`` of live bytes over a watched step, the ``highest`` of
              each part, and CUDA's ``allocator_peak_bytes``; see :mod:`sparsebp_cli.run.memory`
    examples  ``step``, ``values``: ``loss`` of every held-out example and how many ``targets`` it has, in their order
    note      ``level`` (info, warning, error), ``text``
    end       ``status`` (finished, failed, interrupted, cancelled), ``step``, ``text``

A resumed run repeats the steps since its checkpoint. The first value of a (metric, step) counts; readers and the
tracking store use the same rule, so sending late, twice or in pieces gives one table.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

FILE = "journal.jsonl"


class JournalWriter:
    """Appends records. Opening repairs a last line that a killed process left half written."""

    def __init__(self, run_folder: Path, *, durable: bool = True) -> None:
        """Open the journal of a run for a new attempt.

        Args:
            run_folder: The run's folder; it must exist. The caller holds the run's lock.
            durable: Whether :meth:`flush` reaches the disk.
        """
        self.path = run_folder / FILE
        self.durable = durable
        self.attempt = 1 + max((record["attempt"] for record, _ in read(run_folder)), default=0)
        self._file = self.path.open("ab")
        good = max((end for _, end in read(run_folder)), default=0)
        if self._file.tell() != good:
            self._file.truncate(good)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; values that are not finite are kept as text, for JSON has none."""
        record: dict[str, Any] = {"kind": kind, "attempt": self.attempt, "time": time.time()} | fields
        if "values" in record:
            record["values"] = _to_json(record["values"])
        self._file.write(json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        """Make sure that all records are on the disk: called before a checkpoint becomes visible."""
        self._file.flush()
        if self.durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(run_folder: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every whole record and the byte offset after it. A line without its end is left for later.

    Args:
        run_folder: The run's folder.
        offset: Where to begin: 0, or an offset yielded before.

    Yields:
        Record and offset.
    """
    try:
        file = (run_folder / FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a damaged line in the middle loses itself only
            if "values" in record:
                record["values"] = _from_json(record["values"])
            yield record, offset


@dataclass
class History:
    """What a journal says, with repeated steps folded.

    Args:
        metrics: Metric name to step to (time in seconds since 1970, value).
        facts: What is known once per run; later attempts overwrite earlier ones.
        environments: One per attempt.
        notes: (attempt, level, text), in order.
        ends: The ``end`` records, in order.
        warm: (attempt, from_step) pairs, to leave warm-up steps out of statistics.
        layers: Step to layer to its figures.
        examples: Step to ``loss`` and ``targets`` of every held-out example.
        memory: Step to the curve of its memory, as the journal has it.
        proofs: Step to the ``columns`` and the row of each of the ``modules``.
    """

    metrics: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    environments: list[dict[str, Any]] = field(default_factory=list)
    notes: list[tuple[int, str, str]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    warm: list[tuple[int, int]] = field(default_factory=list)
    layers: dict[int, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    examples: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    memory: dict[int, dict[str, Any]] = field(default_factory=dict)
    proofs: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, run_folder: Path) -> History:
        """Read a run's whole journal; an absent one is an empty history."""
        history = cls()
        for record, _ in read(run_folder):
            history.add(record)
        return history

    def add(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Take in one record.

        Args:
            record: As :func:`read` yields it.

        Returns:
            The metric values that were new: those of a repeated step are not.
        """
        new: dict[str, float] = {}
        match record["kind"]:
            case "metrics":
                for name, value in record["values"].items():
                    points = self.metrics.setdefault(name, {})
                    if record["step"] not in points:
                        points[record["step"]] = (record["time"], value)
                        new[name] = value
            case "facts":
                self.facts |= record["values"]
            case "layers":
                self.layers.setdefault(record["step"], record["values"])
            case "examples":
                self.examples.setdefault(record["step"], record["values"])
            case "memory":
                self.memory.setdefault(record["step"], record["values"])
            case "proof":
                self.proofs.setdefault(record["step"], record["values"])
            case "attempt":
                self.environments.append(record["environment"])
                self.warm.append((record["attempt"], record["from_step"]))
            case "note":
                self.notes.append((record["attempt"], record["level"], record["text"]))
            case "end":
                self.ends.append(dict(record))
        return new

    def series(self, name: str) -> dict[int, float]:
        """Return a metric's values by step, in the order of steps; empty when it was never logged."""
        return {step: value for step, (_, value) in sorted(self.metrics.get(name, {}).items())}

    def last(self, name: str) -> float | None:
        """Return a metric's value at its highest step; None when it was never logged."""
        return next(reversed(self.series(name).values()), None)


NOT_FINITE = {"nan", "inf", "-inf"}


def _to_json(value: Any) -> Any:
    """JSON has no numbers that are not finite: alone or by name they become text, inside a list null."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: _to_json(child) for key, child in value.items()}
        case list() | tuple():
            return [None if isinstance(x, float) and not math.isfinite(x) else _to_json(x) for x in value]
    return value


def _from_json(value: Any) -> Any:
    """Words in a list stay words: a class may be called nan."""
    match value:
        case str():
            return float(value) if value in NOT_FINITE else value
        case dict():
            return {key: _from_json(child) for key, child in value.items()}
    return value
