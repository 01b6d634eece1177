"""The leaderboard, version 1: which method trains a better model than the best dense one at the same cost?

    python benchmarks/leaderboard.py                             # page and data from the archives; trains nothing
    python benchmarks/leaderboard.py --run                       # trains what is missing of every task, and archives it
    python benchmarks/leaderboard.py --run spelling --minutes 90 # of one task, for so long

`leaderboard_run.py` says from what and into what. Training writes no page, so that the checkout stays clean from task
to task. Version 0 is in `leaderboard_v0.py`.
"""

from __future__ import annotations

import argparse
import sys

from leaderboard_page import render, write_data
from leaderboard_result import read_results
from leaderboard_run import ROOT, find_tasks, run_all

PAGE, DATA = ROOT / "docs" / "results" / "leaderboard.html", ROOT / "docs" / "results" / "leaderboard.csv"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="TASK", help="train what these tasks miss; without a name all")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of --run: stop with a checkpoint after so long"
    )
    arguments = parser.parse_args()
    known = find_tasks()
    if unknown := [name for name in arguments.run or () if name not in known]:
        parser.error(f"there is no task {unknown[0]}; there are {', '.join(known)}")
    if arguments.run is not None:
        sys.exit(run_all(arguments.run or known, arguments.minutes))
    results = [one for one in read_results() if one.is_trained]  # a task that nobody trained says nothing
    DATA.write_text(write_data(results), encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    trained = ", ".join(one.name for one in results) or "no task yet"
    print(f"{PAGE.relative_to(ROOT)}, {DATA.relative_to(ROOT)}: {trained}")


if __name__ == "__main__":
    main()
