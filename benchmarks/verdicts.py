"""Simulates studies of known truth, and counts how often compare's verdicts are wrong or find the true effect.

    python benchmarks/verdicts.py [--studies 1000] [--write docs/reference/verdicts.md]

Every line is that many simulated studies. Noise of a run has standard deviation 1, so a difference of two runs has
1.41; effects and margins are in standard deviations of such a difference. All draws are seeded.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from simulated import Row, coverage, divergence, examples, looking, margins, null_family, power, selection

from sparsebp_cli.compare import margin

TABLES: tuple[tuple[str, str, Row, Callable[[int], list[Row]]], ...] = (
    (
        "Intervals that hold the truth",
        "Wanted: 0.95. Of simultaneous intervals: all of a study at once. The difference of two "
        "runs with the same skewed noise is symmetric, so its interval holds; beside a baseline without "
        "noise it does not.",
        ("interval", "seeds", "groups", "holds"),
        coverage,
    ),
    (
        "False verdicts where nothing differs",
        "Any of the statements on quality, step time and memory says that something differs, all three with "
        "noise of their "
        "own. Wanted: at most 0.05.",
        ("noise", "seeds", "groups", "any of three kinds", "quality alone"),
        null_family,
    ),
    (
        "Effects that are found",
        "One group differs by 3 standard deviations of a difference. Beside what compare does: Holm's "
        "correction with each "
        "group's own spread.",
        ("seeds", "groups", "found", "found with own spreads"),
        power,
    ),
    (
        "Answers on a margin",
        "The margin is one standard deviation of a difference. Where the truth lies on the margin, any "
        "answer is wrong; "
        "where it lies on either margin, *equal within* is. Wanted: at most 0.05. Where it is 0, *yes* is right.",
        (
            "seeds",
            "groups",
            "on it: any answer",
            "on it: equal",
            "on the other: equal",
            "at 0: any yes",
            "at 0: any equal",
        ),
        margins,
    ),
    (
        "Looking again and again",
        "One group. Wrong: an answer at some look, where the truth lies on the margin; wanted: at most 0.05, which the "
        "answer of one look is not made for. Decided: an answer at some look, where the truth is 0.",
        ("how", "most seeds", "share"),
        looking,
    ),
    (
        "Sentences on held-out examples",
        "Two models that do not differ, 200 examples of 20 documents, with a correlation inside a document; "
        "any group gets "
        "a sentence. Wanted: at most 0.05. Beside it: blocks of 20 where documents are not known, and "
        "neither clusters nor "
        "correction.",
        ("correlation", "groups", "by document", "by block", "neither"),
        examples,
    ),
    (
        "A gate over survivors",
        "A policy that diverges with a chance, and is better by one standard deviation where it does not. Share of "
        "studies with a run that diverged and the margin's answer *yes*.",
        ("seeds", "chance to diverge", "yes", "yes, of survivors alone"),
        divergence,
    ),
    (
        "Seeds that were repeated or chosen",
        "Two groups that do not differ, and someone who tries until they seem to. Repeated: of each seed the first run "
        "counts, so repeating changes nothing; beside it what the best run of each seed would say. Chosen: the seeds "
        "where the policy did best are compared; `compare` cannot take the statement back, but names the seeds that "
        "are there and were left out. Shown is the share of studies with a statement without such a note, and of those "
        "with any statement.",
        ("how", "seeds", "stated without a note", "stated if the best counted"),
        selection,
    ),
)


def skip_forecast() -> None:
    """Skip the forecast of further seeds, which takes most of the time and does not change an answer."""
    margin.seeds_needed = lambda *_: None  # type: ignore[assignment]


def write_page(studies: int, command: str) -> str:
    """Return the page with all tables."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("sparsebp", "numpy", "scipy"))
    parts = [
        "# How often verdicts are wrong",
        "",
        f"Simulated studies whose truth is known, {studies:,} a number, through the functions that `compare` uses. A "
        f"number near 0.05 is known to {1.96 * math.sqrt(0.05 * 0.95 / studies):.3f} or so. Made on "
        f"{time.strftime('%Y-%m-%d')} by "
        f"`{command}` ({packages}, Python {platform.python_version()}).",
    ]
    for title, note, columns, fill in TABLES:
        began = time.process_time()
        rows = fill(studies)
        print(f"{title}: {time.process_time() - began:.0f} CPU seconds", file=sys.stderr, flush=True)
        heads = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        parts += ["", f"## {title}", "", note, "", *heads, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    skip_forecast()
    page = write_page(given.studies, shlex.join(["python", "benchmarks/verdicts.py", *sys.argv[1:]]))
    if given.write is None:
        print(page, end="")
    else:
        given.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
