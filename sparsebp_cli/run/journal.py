"""The journal: one append-only file of JSON lines with all results of a run. Everything else is derived from it.

Records, each with ``kind``, ``attempt`` (from 1) and ``time`` (seconds since 1970):

    attempt   a worker started: ``from_step``, ``environment``
    metrics   ``step`` (1 after the first optimizer step, 0 before), ``values``
    facts     ``values``: facts that are constant in a run, such as the dataset's digest
    layers    ``step``, ``values``: layer or site to its metrics (``kept_share``, ``cosine``, ...; null if unknown)
    proof     ``step``, ``values``: ``columns``, and ``modules``: module to its row, in a step's backward; not repeated
              as long as nothing changes
    examples  ``step``, ``split`` (validation or test; absent: validation), ``values``: for each example in order its
              ``loss``, its number of ``targets``, and its row of the split in ``documents``
    samples   ``step``, ``split``, ``values``: of the first texts that a generation made, ``prompt``, ``reference`` and
              ``prediction``, each shortened
    scores    ``step``, ``values``: metric to what each example alone gives, where the metric is their mean
    seal      ``values``: recipe, versions and digest of the data of an attempt
    allow     ``fields`` of the seal that a user allowed to change before the next attempt
    note      ``level`` (info, warning, error; detail: for ``show`` alone), ``text``
    end       ``status`` (finished, failed, interrupted, cancelled), ``step``, ``text``; ``changes`` if a resume was
              refused because of them: field, its value then, its value now

A resumed run repeats the steps since its checkpoint. The first value of a (metric, step) counts, but after a resume
with an allowed change, earlier values after the checkpoint's step do not. Readers and the tracking store use the same
rule, so sending late, twice or in pieces gives one table.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, Self

from sparsebp_cli.run.budget import LARGEST_SMALL, open_regular, open_to_append, read_json, read_lines
from sparsebp_cli.run.durable import sync
from sparsebp_cli.run.metric import EVAL_LOSS, Metric, find_known
from sparsebp_cli.run.record import ENDS, State, from_json, is_count, is_figure, parse_record, to_json
from sparsebp_cli.run.record_type import EndRecord, Facts, ProofValues, Record
from sparsebp_cli.run.series import Series, add_together, cut

FILE = "journal.jsonl"
OUTLINE = "outline.json"
VERSION = 1
MOST_UNREADABLE = 4  # places that are named; a list of runs shows no more


class JournalWriter:
    """Append records to the event log. Opening a log truncates a last line that a killed process left incomplete."""

    path: Path
    attempt: int

    def __init__(self, run_folder: Path, *, durable: bool = True) -> None:
        """Open the event log in an existing run folder for a new attempt. The caller must hold the run's lock. If not
        ``durable``, :meth:`flush` does not wait for the disk."""
        self.path = run_folder / FILE
        self.durable = durable
        attempt = good = 0
        for record, end in scan(run_folder):
            attempt, good = max(attempt, record["attempt"] if record else 0), end
        self.attempt = 1 + attempt
        is_new = not self.path.exists()
        self._file = open_to_append(self.path)
        if is_new and durable:
            # The name of a new file must reach the disk too.
            sync(run_folder)
        if self._file.seek(0, os.SEEK_END) != good:
            self._file.truncate(good)

    def write(self, kind: str, **fields: object) -> None:
        """Append one record. Convert numbers that are not finite to text, because JSON cannot represent them."""
        record: dict[str, object] = {"kind": kind, "attempt": self.attempt, "time": time.time()} | fields
        if "values" in record:
            record["values"] = to_json(record["values"])
        line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        begin = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:  # for example a full disk: remove the partial line, else the next record would continue it
            self._file.truncate(begin)
            raise

    def flush(self) -> None:
        """Wait until all records are on the disk. Must be called before a checkpoint becomes visible."""
        if self.durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()
            # Cache the outline now, so that no list has to read this log.
            find_outline(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(run_folder: Path, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """Yield every complete record after a byte offset, with the offset of its end. Skip lines without a valid record,
    and leave an incomplete last line for later."""
    for record, end in scan(run_folder, offset):
        if record is not None:
            yield record, end


def scan(run_folder: Path, offset: int = 0) -> Iterator[tuple[Record | None, int]]:
    """Yield every complete line as :func:`read` does. Yield None for a line without a valid record, and for a log that
    is not a regular file."""
    try:
        file = open_regular(run_folder / FILE)
    except FileNotFoundError:
        return
    except UnsupportedOperation:
        yield None, offset
        return
    with file:
        file.seek(offset)
        for line, size in read_lines(file):
            if line is not None and not line.endswith(b"\n"):
                return
            offset += size
            yield (None if line is None else parse_record(line)), offset


def find_outline(run_folder: Path) -> Outline:
    """Return the outline of an event log, from its cache or by reading it. Cache the outline once the log has ended."""
    stamp = read_stamp(run_folder)
    if kept := read_outline(run_folder, stamp):
        return kept
    found = Outline()
    for number, (record, _) in enumerate(scan(run_folder), 1):
        found.add(record, number)
    if found.end is not None and stamp == read_stamp(run_folder):  # unless something was appended meanwhile
        found.save(run_folder, stamp)
    return found


# Older event logs have no cause in their records, only a text that implies it.
_OLD_DIVERGED = re.compile(r"diverged: |the (loss|gradient norm) is (nan|-?inf)")
_OLD_LIMIT = re.compile(r"training\.max_(seconds|cost): ")


def name_cause(record: EndRecord) -> EndRecord:
    """Return a copy of an end record with its cause. The cause is ``diverged`` (the loss or a gradient was not finite)
    or ``limit`` (of time or work, before the last step); it is left out if neither ended the attempt."""
    found = record.copy()
    if "cause" not in record and record["status"] == "failed" and _OLD_DIVERGED.match(record["text"]):
        found["cause"] = "diverged"
    if "cause" not in record and record["status"] == "finished" and _OLD_LIMIT.match(record["text"]):
        found["cause"] = "limit"
    return found


def find_cut(facts: Facts) -> int | None:
    """Return the step after which earlier values no longer count, because a resume changed recipe, code or data; -1
    without a checkpoint, None without a change."""
    changes = facts.get("changes")
    return (changes[-1]["step"] or -1) if changes else None


@dataclass
class History:
    """The content of an event log, with repeated steps merged."""

    # metric name to step to (time in seconds since 1970, value)
    metrics: dict[str, Series] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)  # later attempts overwrite earlier ones
    environments: list[dict[str, object]] = field(default_factory=list)  # one per attempt
    notes: list[tuple[int, str, str]] = field(default_factory=list)  # (attempt, level, text), in order
    ends: list[EndRecord] = field(default_factory=list)  # the end records, in order
    # (attempt, from_step) pairs, to exclude warm-up steps from statistics
    warm: list[tuple[int, int]] = field(default_factory=list)
    layers: dict[int, dict[str, dict[str, float | None]]] = field(default_factory=dict)  # step to layer to its metrics
    # validation: step to loss, targets and documents of every example
    examples: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    test_examples: dict[int, dict[str, list[float]]] = field(default_factory=dict)  # the same for the test split
    # split to step to the prompts, references and predictions of the first generated texts
    samples: dict[str, dict[int, dict[str, list[str]]]] = field(default_factory=dict)
    scores: dict[int, dict[str, list[float]]] = field(default_factory=dict)  # step to metric to each example's score
    # step to the columns and each module's row
    proofs: dict[int, ProofValues] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)  # parts without a valid record, such as "line 7"

    @classmethod
    def load(cls, run_folder: Path) -> History:
        """Read a run's whole event log. If it is missing, return an empty history."""
        history = cls()
        for number, (record, _) in enumerate(scan(run_folder), 1):
            if record is None:
                history.unreadable.append(f"line {number}")
            else:
                history.add(record)
        return history

    def find_metric(self, name: str) -> Metric | None:
        """Return a metric of SparseBP or of the recipe by name, with unit and direction; None if unknown."""
        return find_known(name, [self.facts.get("metrics", {})])

    def describe_unreadable(self) -> str:
        """Describe the parts without a valid record; empty if there are none."""
        return describe_unreadable(self.unreadable)

    def add(self, record: Record) -> dict[str, float]:
        """Add one record of :func:`read`. Return the new metric values, without those of a repeated step."""
        new: dict[str, float] = {}
        match record["kind"]:
            case "metrics":
                new = add_together(self.metrics, record["step"], record["time"], record["values"])
            case "facts":
                self.facts |= record["values"]
                self._cut(find_cut(record["values"]))
            case "layers":
                # The first value of a step counts, here and below, unless the recipe changed. See decision 2.
                self.layers.setdefault(record["step"], record["values"])
            case "examples":
                examples = self.test_examples if record.get("split") == "test" else self.examples
                examples.setdefault(record["step"], record["values"])
            case "samples":
                self.samples.setdefault(record["split"], {}).setdefault(record["step"], record["values"])
            case "scores":
                scores = self.scores.setdefault(record["step"], {})
                self.scores[record["step"]] = record["values"] | scores  # the first value counts, as for metrics
            case "proof":
                self.proofs.setdefault(record["step"], record["values"])
            case "attempt":
                self.environments.append(record["environment"])
                self.warm.append((record["attempt"], record["from_step"]))
            case "note":
                self.notes.append((record["attempt"], record["level"], record["text"]))
            case "end":
                self.ends.append(name_cause(record))
        return new

    def _cut(self, step: int | None) -> None:
        if step is None:
            return
        cut(self.metrics, step)
        parts: tuple[Any, ...] = (self.layers, self.examples, self.test_examples, self.scores, self.proofs)
        for points in (*parts, *self.samples.values()):
            for late in [number for number in points if number > step]:
                del points[late]

    def series(self, name: str) -> Mapping[int, float]:
        """Return a metric's values by ascending step; empty if it was never logged."""
        return self.metrics[name].without_times() if name in self.metrics else {}

    def median(self, name: str) -> float | None:
        """Return the median of a metric's finite values over the measured steps; None if there are none."""
        values = [value for value in self.series(name).values() if math.isfinite(value)]
        from statistics import median

        return median(values) if values else None

    def last(self, name: str) -> float | None:
        """Return a metric's value at its highest step; None if it was never logged."""
        points = self.metrics.get(name)
        return points[points.last_step][1] if points else None


SAVED = "saved"  # split name of the questions to the saved model
UNENDED = "tokens without an end)"  # ending of an answer that was cut


def list_asked(history: History) -> list[tuple[str, str, str]]:
    """Return prompt, reference and answer of each question to the saved model at the end."""
    steps = history.samples.get(SAVED, {})
    if not steps:
        return []
    texts = steps[max(steps)]
    return list(zip(texts["prompt"], texts["reference"], texts["prediction"], strict=False))


def list_samples(history: History, num_examples: int = 2) -> Iterator[tuple[int, str, str, str]]:
    """Yield step, prompt, reference and prediction of some texts on validation: the first ``num_examples`` of the
    first, the middle and the last generation."""
    steps = sorted(history.samples.get("validation", {}))
    for step in dict.fromkeys(steps[place] for place in (0, len(steps) // 2, -1) if steps):
        texts = history.samples["validation"][step]
        of_each = zip(texts["prompt"], texts["reference"], texts["prediction"], strict=False)
        for prompt, reference, prediction in list(of_each)[:num_examples]:
            yield step, prompt, reference, prediction


def describe_unreadable(places: Sequence[str]) -> str:
    """Describe the parts of an event log without a valid record; empty if there are none."""
    if not places:
        return ""
    parts = ", ".join(places[:3]) + ", ..." * (len(places) > 3)
    return f"{parts} of its event log cannot be read and {'are' if len(places) > 1 else 'is'} left out"


@dataclass
class Outline:
    """A summary of an event log."""

    attempts: int = 0  # number of workers that were started
    end: State | None = None  # how the last attempt ended; None: unknown
    step: int = 0  # the highest step of any metric
    eval_step: int = -1  # the highest step with a validation loss
    eval_loss: float | None = None  # the loss at that step
    unreadable: list[str] = field(default_factory=list)  # the first places without a valid record, such as "line 7"

    def add(self, record: Record | None, number: int) -> None:
        """Add line ``number`` (from 1) of the log. ``record`` is None if the line has no valid record."""
        if record is None:
            if len(self.unreadable) < MOST_UNREADABLE:
                self.unreadable.append(f"line {number}")
            return
        self.attempts = max(self.attempts, record["attempt"])
        match record["kind"]:
            case "attempt":
                self.end = None
            case "end":
                self.end = State(record["status"])
            case "metrics" if record["values"]:
                self.step = max(self.step, record["step"])
                if EVAL_LOSS.name in record["values"] and record["step"] > self.eval_step:
                    self.eval_step, self.eval_loss = record["step"], record["values"][EVAL_LOSS.name]
            case "facts" if (step := find_cut(record["values"])) is not None:
                self.step = max(0, min(self.step, step))
                if self.eval_step > step:
                    self.eval_step, self.eval_loss = -1, None

    def save(self, run_folder: Path, stamp: list[int]) -> None:
        """Write the outline next to its event log, atomically. Ignore failures, because the log has everything."""
        # A cache need not survive a power cut, so do not use `durable`.
        part = run_folder / f"{OUTLINE}.{os.getpid()}.part"
        content = {"version": VERSION, "journal": stamp} | {k: to_json(v) for k, v in asdict(self).items()}
        with suppress(OSError):
            try:
                part.write_text(json.dumps(content) + "\n", encoding="utf-8")
                part.replace(run_folder / OUTLINE)
            except OSError:
                part.unlink(missing_ok=True)


def read_stamp(run_folder: Path) -> list[int]:
    """Return size and modification time of an event log; empty if there is none."""
    try:
        found = (run_folder / FILE).stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def read_outline(run_folder: Path, stamp: list[int]) -> Outline | None:
    """Return the cached outline if it matches the log's stamp, else None."""
    try:
        kept = read_json(run_folder / OUTLINE, LARGEST_SMALL)
        if not isinstance(kept, dict) or (kept.pop("version"), kept.pop("journal")) != (VERSION, stamp):
            return None
        kept["eval_loss"] = from_json(kept["eval_loss"])
        found = Outline(**kept)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = is_count(found.attempts) and is_count(found.step) and is_figure(found.eval_loss)
    sound = sound and isinstance(found.unreadable, list) and all(isinstance(place, str) for place in found.unreadable)
    if not sound or found.end not in {None, *ENDS}:
        return None
    found.end = None if found.end is None else State(found.end)
    return found
