"""Compares trainings with and without lossless, drawn pairwise over everything in which trainings differ.

    python benchmarks/exactness.py --minutes 60 --processes 2 --write    # benchmarks/results/exactness.json
    python benchmarks/exactness.py --minutes 5
    python benchmarks/exactness.py --minutes 5 --only entry=GRPO --only adapter=lora

tests/exactness/axis.py lists the axes: options, losses, labels, batches, architectures, adapters, wrappers, entry
paths, accumulation, policies beside it, and the order of batches. The draw prefers pairs of values that met least.
Each gradient is compared with that of a copy that the engine never sees. A failure is shrunk and printed as a script.
The exit code is 1 if anything was wrong. A case that hangs is wrong. With --write the file is written every minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from tests.exactness.axis import AXES, Case, Draw, pairs_of
from tests.exactness.judge import Outcome, Subject, judge
from tests.exactness.judging import Pool
from tests.exactness.shrink import shrink, write_script
from tests.trials import find_commit

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "exactness.json"
COMMIT = find_commit()  # at the begin: the files may change meanwhile
CLASSES = ("right", "plain", "refused", "wrong")
TELL_SECONDS = 60  # between two lines, and two files
LAST_SECONDS = 50  # after the end for the cases under way: longer than one that hangs may be idle


@dataclass
class Failure:
    """The smallest case so far that shows a failure."""

    case: Case
    text: str
    script: str = ""  # made of the last one


Found = list[Outcome] | Failure | None  # what a judge says of a case; None: that it makes it smaller


@dataclass
class Tally:
    """Counts of comparisons."""

    total: Counter[str] = field(default_factory=Counter)
    axes: dict[str, dict[str, Counter[str]]] = field(
        default_factory=lambda: {axis: {value: Counter() for value in values} for axis, values in AXES.items()}
    )
    reasons: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, outcomes: list[Outcome]) -> None:
        """Add the updates of a run."""
        for outcome in outcomes:
            self.total[outcome.verdict] += 1
            self.total["alone"] += outcome.alone
            for axis, value in case.items():
                self.axes[axis][value][outcome.verdict] += 1
            if outcome.verdict in ("plain", "refused", "unjudged"):
                self.reasons[f"{outcome.verdict}: {outcome.text[:150]}"] += 1
        judged = sum(outcome.verdict in CLASSES for outcome in outcomes)
        self.pairs.update(dict.fromkeys(pairs_of(case), judged) if judged else {})

    @property
    def judged(self) -> int:
        """Comparisons with a verdict."""
        return sum(self.total[name] for name in CLASSES)

    def record(self, seed: int) -> dict[str, Any]:
        """Return the counts for a file."""
        return {
            "about": {name: version(name) for name in ("torch", "transformers", "peft", "trl")} | {"seed": seed},
            "date": datetime.now(UTC).date().isoformat(),
            "commit": COMMIT,
            "comparisons": self.judged,
            "total": {name: self.total[name] for name in (*CLASSES, "alone", "unjudged")},
            "pairs": self._count_pairs(),
            "axes": {
                axis: {value: [count[name] for name in CLASSES] for value, count in found.items()}
                for axis, found in self.axes.items()
            },
            "reasons": dict(self.reasons.most_common(60)),
            "wrong": self.wrong,
        }

    def _count_pairs(self) -> dict[str, list[int]]:
        """Return, for every two axes, how many pairs of values can be, how many were compared, and how often the rarest
        of these was."""
        possible = {(a, b): len(AXES[a]) * len(AXES[b]) for a, b in combinations(AXES, 2)}
        found: dict[tuple[str, str], list[int]] = {both: [] for both in possible}
        for (a, _, b, _), compared in self.pairs.items():
            found[a, b].append(compared)
        return {f"{a} x {b}": [possible[a, b], len(n), min(n, default=0)] for (a, b), n in found.items()}


def main() -> None:
    """Draw and judge until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a value of an axis, as axis=value")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write", action="store_true", help="write the counts to the file --out")
    asked = parser.parse_args()
    unknown = [one for one in asked.only if one.partition("=")[2] not in AXES.get(one.partition("=")[0], ())]
    if unknown:
        parser.error(f"no such value: {', '.join(unknown)}")
    only: dict[str, tuple[str, ...]] = {}
    for one in asked.only:
        axis, _, value = one.partition("=")
        only[axis] = (*only.get(axis, ()), value)
    tally = Tally()
    run(tally, Draw(asked.seed, only), asked)
    show(tally)
    sys.exit(bool(tally.wrong))


def run(tally: Tally, draw: Draw, asked: argparse.Namespace) -> None:
    """Judge cases until the time is over, and then at most a minute until those under way are."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the counts are written then, too
    pool, number = Pool(asked.processes, prepare, judge_case), 0
    try:
        while not pool.free:
            list(pool.listen())
        told = time.monotonic()
        end = told + 60 * asked.minutes
        while (now := time.monotonic()) < end or (now < end + LAST_SECONDS and not pool.is_idle):
            for judging in pool.free if now < end else ():
                known = [one["case"] for one in tally.wrong]
                judging.ask(draw.next(), 1_000_000 * asked.seed + number, known)
                number += 1
            for (case, seed, _), found in pool.listen():
                take(tally, case, seed, found)
            if now > told + TELL_SECONDS:
                told = now
                print(f"{number} runs: {dict(tally.total)}", flush=True)
                write(tally, asked)
        for case, seed, _ in pool.end():  # it computes still, so it is no failure yet
            if all(one["seed"] != seed for one in tally.wrong):
                tally.add(case, [Outcome("unjudged", f"the time was over in the case of seed {seed}")])
    finally:
        pool.end()
        write(tally, asked)


def prepare() -> None:
    """Prepare a process that judges."""
    import tests.exactness.trainer  # noqa: F401 - takes seconds, which are no case's

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # Memory that nothing has written holds no numbers, so that a result which depends on it is found each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def judge_case(case: Case, seed: int, known: list[Case]) -> Iterator[Found]:
    """Judge a run, and make small what is wrong, unless it has the values of a known failure."""
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        subject = Subject(case, seed)
        outcomes = judge(subject)
        yield outcomes
        text = next((one.text for one in outcomes if one.verdict == "wrong"), "")
        if not text or any(one.items() <= case.items() for one in known):
            return
        yield Failure(case, text)
        for found in shrink(subject):
            subject, text = found or (subject, text)
            yield Failure(subject.case, text) if found else None
        yield Failure(subject.case, text, write_script(subject, text))


def take(tally: Tally, case: Case, seed: int, found: Found | str) -> None:
    """Count a run; note and print what is wrong. A text says how its process was lost."""
    failure = next((one for one in tally.wrong if one["seed"] == seed), None)
    if isinstance(found, str):
        if failure is not None:  # lost while it made a failure smaller
            return
        tally.add(case, [Outcome("wrong", found)])
        found = Failure(case, found)
    if isinstance(found, list):
        tally.add(case, found)
    elif found is not None:
        if failure is None:
            failure = {"seed": seed}
            tally.wrong.append(failure)
            print(f"WRONG, seed {seed}: {found.text}", flush=True)
        smallest = {axis: value for axis, value in found.case.items() if value != AXES[axis][0]}
        failure |= {"case": smallest, "text": found.text}
        if found.script:
            print(f"WRONG {smallest}: {found.text}\n\n{found.script}", flush=True)


def write(tally: Tally, asked: argparse.Namespace) -> None:
    """Write the counts, if asked."""
    if asked.write:
        whole = asked.out.with_suffix(".part")  # a kill leaves the file of the minute before
        whole.write_text(json.dumps(tally.record(asked.seed), indent=1) + "\n", encoding="utf-8")
        whole.replace(asked.out)


def show(tally: Tally) -> None:
    """Print the counts by axis and by pair."""
    print(f"{tally.judged} comparisons: {dict(tally.total)}")
    for axis, values in tally.axes.items():
        print(axis)
        for value, verdicts in values.items():
            print(f"  {value:28}", *(f"{name} {verdicts[name]:6}" for name in CLASSES))
    for both, (possible, seen, least) in tally.record(0)["pairs"].items():
        print(f"{both:30} {seen} of {possible} pairs of values, each compared {least} times or more")
    for reason, times in tally.reasons.most_common(15):
        print(f"{times:6} {reason}")


if __name__ == "__main__":
    main()
