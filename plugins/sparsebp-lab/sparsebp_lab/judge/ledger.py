"""The ledger of a store: every question, every look, and every answer, in ``judge/ledger.jsonl``.

    {"entry": {"kind": "ledger", "salt": ...}, "digest": ...}        the first line
    {"entry": {"kind": "asked", "question": ..., ...}, "digest": ...}

A judge appends a line while it holds the lock, and acts on it only once it is on the disk. The digest covers the line
before, so a removed or changed line is noticed. Each answer, and the plan of each run that a judge starts, records the
number of lines and the last digest. The ledger must extend that state, so removed last lines are noticed. Nothing is
signed: a change of all these files at once is not noticed.

An existing entry is not written again. So a killed judge can repeat its last action, and two judges of one question
write one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from sparsebp_cli.errors import RunBusyError, UsageError
from sparsebp_cli.plan import LedgerMark
from sparsebp_cli.run import durable, home
from sparsebp_cli.run.budget import LARGEST_ARTIFACT, LARGEST_PLAN, LARGEST_SMALL, read_json
from sparsebp_cli.run.folder import check_locks, list_folders
from sparsebp_lab.judge.level import find_free, find_level, find_needed
from sparsebp_lab.judge.move import WORST, Aim, MoveBar, Outcome, Stage
from sparsebp_lab.judge.screen import ScreenSquares

Kind = Literal["ledger", "asked", "aimed", "staked", "look", "answered", "opened"]
Entry = dict[str, Any]
SEEDS = 2**31
ON_VALIDATION: tuple[Stage, ...] = ("screen", "pairs", "gain")
SIDES = ("baseline", "candidate")


@dataclass(frozen=True)
class LedgerLook:
    """A pair of runs, or one run of the baseline's pool."""

    number: int  # within its stage, from 1
    gain: float | None  # the candidate's gain, higher is better; None: in the pool, and if a run diverged
    runs: tuple[str, ...]  # ids, the baseline's first
    values: tuple[float | None, ...]  # the metric's values, the baseline's first; None: diverged

    @property
    def diverged(self) -> str:
        """The side whose run diverged, the baseline before the candidate; empty if none did."""
        return next((side for side, value in zip(SIDES, self.values, strict=False) if value is None), "")

    def describe(self) -> str:
        """Return the loss of a pair in words."""
        return f"run {self.runs[-1]} lost {-(self.gain or 0.0):.4g} against {self.runs[0]}"


@dataclass
class LedgerQuestion:
    """The ledger's entries about one question."""

    digest: str
    asked: Entry
    aim: Aim | None = None
    bar: MoveBar | None = None
    place: int | None = None  # of its level
    looks: dict[Stage, list[LedgerLook]] = field(default_factory=dict)
    outcome: Outcome | None = None
    reason: str = ""
    answered_at: float | None = None  # seconds since 1970
    spent: dict[str, float] = field(default_factory=lambda: {"flops": 0.0, "seconds": 0.0, "runs": 0})
    dearest: dict[str, float] = field(default_factory=lambda: {"flops": 0.0, "seconds": 0.0})  # largest cost of one run

    @property
    def ruins(self) -> list[LedgerLook]:
        """Looks in which the candidate lost at least the worst case."""
        looks = [look for stage in ON_VALIDATION for look in self.looks.get(stage, [])]
        return [look for look in looks if self.bar and look.gain is not None and look.gain <= -self.bar.worst]

    def gains(self, stage: Stage) -> list[float]:
        """Return the gains of a stage in order, without looks in which a run diverged."""
        return [look.gain for look in self.looks.get(stage, []) if look.gain is not None]


@dataclass
class Book:
    """The parsed ledger."""

    salt: str = ""
    questions: dict[str, LedgerQuestion] = field(
        default_factory=dict
    )  # by digest, in the order in which they were asked
    charged: dict[str, float] = field(default_factory=dict)  # seconds by run that a question has paid for
    opened: dict[str, Entry] = field(default_factory=dict)  # the entry by data whose test split was opened
    digests: list[str] = field(default_factory=list)  # of each line

    @property
    def mark(self) -> LedgerMark:
        """The ledger's length and last digest."""
        return LedgerMark(questions=len(self.questions), lines=len(self.digests), digest=self.last_digest)

    @property
    def last_digest(self) -> str:
        """The digest of the last line; empty without any."""
        return self.digests[-1] if self.digests else ""

    @property
    def taken(self) -> set[int]:
        """Places of levels whose candidates were not kept or are not decided yet."""
        all_of = self.questions.values()
        return {one.place for one in all_of if one.place is not None and one.outcome != "better"}

    @property
    def num_kept(self) -> int:
        """Candidates that were kept."""
        return sum(one.outcome == "better" for one in self.questions.values())

    def find_squares(self, baseline: str) -> ScreenSquares:
        """Return the squares of all pairs with a baseline, by its digest; the spread of a pair follows from them."""
        found = ScreenSquares()
        for one in self.questions.values():
            if one.asked["baseline"]["digest"] == baseline:
                for stage in ON_VALIDATION:
                    found = found.add(one.gains(stage))
        return found

    def find_values(self, baseline: str) -> list[float]:
        """Return the validation metric of each run of a baseline, by its digest, once a run."""
        of_runs: dict[str, float] = {}
        stages: tuple[Stage, ...] = ("pool", *ON_VALIDATION)
        for one in self.questions.values():
            if one.asked["baseline"]["digest"] == baseline:
                looks = [look for stage in stages for look in one.looks.get(stage, [])]
                of_runs |= {look.runs[0]: look.values[0] for look in looks if look.values[0] is not None}
        return list(of_runs.values())

    def find_seconds(self, question: LedgerQuestion) -> dict[str, float]:
        """Return the mean seconds of a run of each side, over the pairs of a question; empty before the first pair."""
        pairs = [look.runs for some in question.looks.values() for look in some if len(look.runs) == 2]
        seconds = {side: [self.charged.get(runs[i], 0.0) for runs in pairs] for i, side in enumerate(SIDES)}
        return {side: math.fsum(some) / len(some) for side, some in seconds.items() if some}

    def find_seed(self, *key: str | int) -> int:
        """Return the seed of a run: it is reproducible, but unpredictable without the ledger's salt."""
        text = json.dumps([self.salt, *key])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % SEEDS

    def has(self, entry: Mapping[str, object]) -> bool:
        """Return whether the ledger has an entry of this kind, question, stage and number."""
        one = self.questions.get(str(entry.get("question")))
        match entry["kind"]:
            case "look":
                looks = [] if one is None else one.looks.get(entry["stage"], [])  # type: ignore[call-overload]
                return any(look.number == entry["number"] for look in looks)
            case "opened":
                return entry["data"] in self.opened
        facts = {"asked": one, "aimed": one and one.aim, "staked": one and one.bar, "answered": one and one.outcome}
        return facts[str(entry["kind"])] is not None

    def add(self, entry: Entry) -> None:
        """Apply an entry."""
        if entry["kind"] == "ledger":
            self.salt = str(entry["salt"])
        elif entry["kind"] == "asked":
            self.questions[entry["question"]] = LedgerQuestion(entry["question"], entry)
        else:
            _take(self.questions[entry["question"]], entry)
        self.charged |= {run: cost["seconds"] for run, cost in entry.get("charged", {}).items()}
        if entry["kind"] == "opened":
            self.opened[entry["data"]] = entry


def _take(one: LedgerQuestion, entry: Entry) -> None:
    match entry["kind"]:
        case "aimed":
            one.aim = Aim(entry["effect"], entry["pair_spread"], entry["margin"], entry.get("run_spread", 0.0))
        case "staked":
            worst = entry["worst"] if "worst" in entry or one.aim is None else WORST * one.aim.effect  # 0.5: none
            one.place, one.bar = entry["place"], MoveBar(entry["design"], entry["needed"], worst)
        case "look":
            look = LedgerLook(entry["number"], entry["gain"], tuple(entry["runs"]), tuple(entry["values"]))
            one.looks.setdefault(entry["stage"], []).append(look)
        case "answered":
            one.outcome, one.reason, one.answered_at = entry["outcome"], entry["reason"], entry["time"]
    for cost in entry.get("charged", {}).values():
        one.spent["runs"] += 1
        for unit in ("flops", "seconds"):
            one.spent[unit] += cost[unit]
            one.dearest[unit] = max(one.dearest[unit], cost[unit])


class Ledger:
    """The ledger of a store. Raises UsageError if a line was changed or removed."""

    def __init__(self, place: Path | None = None) -> None:
        """Open the ledger in a SparseBP folder; None: this machine's folder."""
        self.folder: Path = (place or home()) / "judge"
        self.file: Path = self.folder / "ledger.jsonl"
        self._marks: dict[str, LedgerMark] | None = None  # by the file that depends on this length of the ledger

    def read(self) -> Book:
        """Return the ledger's content, without a last line that lacks its end: no command relied on it."""
        return self._read()[0]

    def write(self, entry: Mapping[str, object]) -> Book:
        """Append an entry unless it exists, and return the ledger. A free place for a level is determined here, while
        the lock is held."""
        self._prepare()
        with FileLock(self.folder / "ledger.lock"):
            book, size = self._read()
            if self.file.exists() and self.file.stat().st_size > size:
                durable.cut(self.file, size)
            if not book.digests:
                self._append(book, {"kind": "ledger", "salt": secrets.token_hex(16)})
            if not book.has(entry):
                found: Entry = dict(entry)
                if entry["kind"] == "staked":
                    found["place"] = find_free(book.taken)
                    found |= {"level": find_level(found["place"]), "needed": find_needed(found["place"])}
                if "charged" in found:  # if two judges needed one run, the first pays
                    found["charged"] = {run: cost for run, cost in found["charged"].items() if run not in book.charged}
                self._append(book, found)
        return book

    def keep_answer(self, question: str, facts: Mapping[str, object]) -> None:
        """Write an answer into ``judge/answers``; it replaces an earlier answer to the same question."""
        folder = self.folder / "answers"
        durable.make_folder(folder, exist_ok=True)
        durable.write_file(folder / f"{question}.json", json.dumps(facts))

    @contextmanager
    def hold(self, question: str) -> Iterator[None]:
        """Hold the lock of a question; raise RunBusyError if another judge works at it."""
        self._prepare()
        lock = FileLock(self.folder / f"{question}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise RunBusyError(
                f"another judge command is working on this question and holds the lock {lock.lock_file}; wait until "
                "it ends"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _prepare(self) -> None:
        check_locks(self.folder)

    def _append(self, book: Book, entry: Entry) -> None:
        entry |= {"time": time.time()}
        digest = _digest(entry, book.last_digest)
        line = json.dumps({"entry": entry, "digest": digest}, allow_nan=False) + "\n"
        durable.append(self.file, line.encode())
        book.add(entry)
        book.digests.append(digest)
        self._note(book)

    def _read(self) -> tuple[Book, int]:
        """Return the ledger, and where its last whole line ends."""
        if self._marks is None:  # before the ledger is read, because another judge may add a line and a run meanwhile
            self._marks = dict(_find_marks(self.folder))
        book, size = Book(), 0
        content = self.file.read_bytes() if self.file.exists() else b""
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)
                entry, digest = found["entry"], found["digest"]
                if digest != _digest(entry, book.last_digest):
                    raise ValueError("the line's digest does not match the lines before it")
                book.add(entry)
            except (ValueError, LookupError, TypeError) as error:
                raise UsageError(
                    f"{self.file}:{number}: the ledger was changed or damaged ({error}); restore the file from a "
                    "copy, or set SPARSEBP_HOME to a new folder"
                ) from None
            book.digests.append(digest)
            size += len(line)
        self._check(book)
        self._note(book)
        return book, size

    def _check(self, book: Book) -> None:
        """Raise UsageError unless the ledger extends every length that a file has recorded."""
        for source, mark in (self._marks or {}).items():
            if len(book.digests) < mark.lines:
                has = f"has {len(book.digests)} lines" if self.file.exists() else "is missing"
            elif book.digests[mark.lines - 1] != mark.digest:
                has = f"has a different line {mark.lines}"
            else:
                continue
            raise UsageError(
                f"{self.file} {has}, but {source} recorded {mark.lines} lines, {mark.questions} questions and digest "
                f"{mark.digest[:12]}: the ledger was changed; restore the whole ledger from a copy, or set "
                "SPARSEBP_HOME to a new folder"
            )

    def _note(self, book: Book) -> None:
        """Store how far the ledger goes."""
        if book.digests and self._marks is not None:
            self._marks["this command"] = book.mark


def _find_marks(folder: Path) -> Iterator[tuple[str, LedgerMark]]:
    """Yield each file in a folder that depends on the ledger, with the recorded length. Unreadable plans are skipped.
    Answers are written atomically, so an unreadable answer was damaged."""
    for file in sorted((folder / "answers").glob("*.json")):
        try:
            facts = read_json(file, LARGEST_ARTIFACT)["ledger"]
            yield str(file), LedgerMark(questions=facts["asked"], lines=facts["lines"], digest=facts["digest"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"{file}: the answer was changed or damaged ({error}); restore the file from a copy"
            ) from None
    for file in sorted((folder / "scripts").glob("*/process.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            yield str(file), LedgerMark.model_validate(read_json(file, LARGEST_SMALL)["ledger"])
    for run in list_folders(folder.parent / "runs"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            plan = read_json(run / "plan.json", LARGEST_PLAN)
            yield str(run / "plan.json"), LedgerMark.model_validate(plan["provenance"]["ledger"])


def _digest(entry: Mapping[str, object], last: str) -> str:
    text = json.dumps([last, entry], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
