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
    examples  ``step``, ``split`` (validation or test; absent: validation), ``values``: ``loss`` of every example, how
              many ``targets`` it has, and of which of the ``documents`` (rows of the split) it is, in their order
    seal      ``values``: recipe, versions and digest of the data that an attempt runs under
    allow     ``fields`` of the seal that a user allowed to change before the next attempt
    note      ``level`` (info, warning, error), ``text``
    end       ``status`` (finished, failed, interrupted, cancelled), ``step``, ``text``; ``changes`` where a resume was
              refused for them: field, its value then, its value now

A resumed run repeats the steps since its checkpoint. The first value of a (metric, step) counts; readers and the
tracking store use the same rule, so sending late, twice or in pieces gives one table.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sparsebp_cli.run.outline import JOURNAL, Outline, read_outline, read_stamp
from sparsebp_cli.run.record import is_record, parse_record, to_json

FILE = JOURNAL


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
        attempt = good = 0
        for record, end in scan(run_folder):
            attempt, good = max(attempt, record["attempt"] if record else 0), end
        self.attempt = 1 + attempt
        self._file = self.path.open("ab", buffering=0)
        if self._file.seek(0, os.SEEK_END) != good:
            self._file.truncate(good)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; values that are not finite are kept as text, for JSON has none."""
        record: dict[str, Any] = {"kind": kind, "attempt": self.attempt, "time": time.time()} | fields
        if "values" in record:
            record["values"] = to_json(record["values"])
        line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        begin = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:  # such as a full disk: the next record must not continue half a line
            self._file.truncate(begin)
            raise

    def flush(self) -> None:
        """Make sure that all records are on the disk: called before a checkpoint becomes visible."""
        if self.durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        if not self._file.closed:
            self.flush()
            self._file.close()
            find_outline(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(run_folder: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every whole record and the byte offset after it. A line without its end is left for later.

    A line that holds no record loses itself only: it is left out.

    Args:
        run_folder: The run's folder.
        offset: Where to begin: 0, or an offset yielded before.

    Yields:
        Record and offset.
    """
    for record, end in scan(run_folder, offset):
        if record is not None:
            yield record, end


def scan(run_folder: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield every whole line and the byte offset after it, as :func:`read` does, with None for one without a record.

    Args:
        run_folder: The run's folder.
        offset: Where to begin: 0, or an offset yielded before.

    Yields:
        Record or None, and offset.
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
            yield parse_record(line), offset


def find_outline(run_folder: Path) -> Outline:
    """Return a journal in a few numbers: as they are kept beside it, else by reading it.

    Args:
        run_folder: The run's folder.

    Returns:
        The outline; that of a journal that ended is kept for the next reader.
    """
    stamp = read_stamp(run_folder)
    if kept := read_outline(run_folder, stamp):
        return kept
    found = Outline()
    for number, (record, _) in enumerate(scan(run_folder), 1):
        found.add(record, number)
    if found.end is not None and stamp == read_stamp(run_folder):  # nothing was appended meanwhile
        found.save(run_folder, stamp)
    return found


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
        examples: Step to ``loss``, ``targets`` and ``documents`` of every held-out example, of the validation split.
        test_examples: The same of the test split.
        memory: Step to the curve of its memory, as the journal has it.
        proofs: Step to the ``columns`` and the row of each of the ``modules``.
        unreadable: Its parts that hold no record, such as ``line 7``.
    """

    metrics: MutableMapping[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    environments: list[dict[str, Any]] = field(default_factory=list)
    notes: list[tuple[int, str, str]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    warm: list[tuple[int, int]] = field(default_factory=list)
    layers: dict[int, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    examples: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    test_examples: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    memory: dict[int, dict[str, Any]] = field(default_factory=dict)
    proofs: dict[int, dict[str, Any]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, run_folder: Path) -> History:
        """Read a run's whole journal; an absent one is an empty history."""
        history = cls()
        for number, (record, _) in enumerate(scan(run_folder), 1):
            if record is None:
                history.unreadable.append(f"line {number}")
            else:
                history.add(record)
        return history

    def tell_unreadable(self) -> str:
        """Return in a few words which parts hold no record; empty when every part does."""
        return tell_unreadable(self.unreadable)

    def dump(self) -> dict[str, Any]:
        """Return all that the journal says beside metrics, as plain data that :meth:`take` reads."""
        return {
            "facts": self.facts,
            "environments": self.environments,
            "notes": self.notes,
            "ends": self.ends,
            "warm": self.warm,
            "layers": self.layers,
            "examples": self.examples,
            "test_examples": self.test_examples,
        }

    def take(self, dumped: Mapping[str, Any]) -> None:
        """Take in what :meth:`dump` returned, after it went through JSON; what is no record is left out.

        Args:
            dumped: From a store, so anything may be in it.
        """
        for part in ("facts", "environments", "notes", "ends", "layers", "examples", "test_examples"):
            try:
                records = [HEAD | record for record in _undump(part, dumped)]
            except (AttributeError, KeyError, TypeError, ValueError):
                records = [{}]
            for record in records:
                if is_record(record):
                    self.add(record)
                elif part not in self.unreadable:
                    self.unreadable.append(part)

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
                examples = self.test_examples if record.get("split") == "test" else self.examples
                examples.setdefault(record["step"], record["values"])
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

    def median(self, name: str) -> float | None:
        """Return the median of a metric's finite values over the steps at which it was measured; None without any."""
        values = [value for value in self.series(name).values() if math.isfinite(value)]
        return statistics.median(values) if values else None

    def last(self, name: str) -> float | None:
        """Return a metric's value at its highest step; None when it was never logged."""
        return next(reversed(self.series(name).values()), None)


def tell_unreadable(places: Sequence[str]) -> str:
    """Return in a few words which parts of a journal hold no record; empty when every part does."""
    if not places:
        return ""
    parts = ", ".join(places[:3]) + ", ..." * (len(places) > 3)
    return f"{parts} of its journal cannot be read and {'are' if len(places) > 1 else 'is'} left out"


HEAD = {"attempt": 1, "time": 0.0}  # of records that come from elsewhere


def _undump(part: str, dumped: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = dumped[part] if part != "test_examples" else dumped.get(part, {})  # older runs have none
    match part:
        case "facts":
            return [{"kind": "facts", "values": content}]
        case "environments":
            starts = zip(dumped["warm"], content, strict=True)
            return [{"kind": "attempt", "attempt": a, "from_step": s, "environment": e} for (a, s), e in starts]
        case "notes":
            return [{"kind": "note", "attempt": a, "level": level, "text": text} for a, level, text in content]
        case "ends":
            return [{"kind": "end"} | end for end in content]
        case "test_examples":
            return [
                {"kind": "examples", "split": "test", "step": int(step), "values": values}
                for step, values in content.items()
            ]
    return [{"kind": part, "step": int(step), "values": values} for step, values in content.items()]
