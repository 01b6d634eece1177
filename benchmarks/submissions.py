"""Holds the submissions of a change against the leaderboard's rules, and trains two cells of each again.

    python benchmarks/submissions.py                      # those that differ from origin/main
    python benchmarks/submissions.py --since HEAD~3
    python benchmarks/submissions.py --all

A submission with a package of its own is installed first. Its code runs with the rights of whoever calls this: read it
before. Ends with 1 if a rule is not kept. What runs for every change (`.ci/run`) calls it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from checkout import ROOT, use_checkout

use_checkout()

from brought import SPARSEBP  # noqa: E402

FOLDER = ROOT / "docs" / "results" / "leaderboard" / "v1" / "submissions"
CELLS = 2


def find_submissions(folder: Path) -> list[Path]:
    """Return the folder of every submission."""
    return sorted(file.parent for file in folder.glob("*/submission.yaml"))


def find_changed(since: str, folder: Path) -> list[Path]:
    """Return the submissions of which a file differs from where this branch left another one: committed, changed or not
    under git yet. All of them where that commit is not known, as in a clone without history."""
    found = find_submissions(folder)
    if not found:
        return []
    base = _git(folder, "merge-base", since, "HEAD")
    if base is None:
        return found
    names = [
        *(_git(folder, "diff", "--name-only", "--relative", base.strip(), "--", ".") or "").splitlines(),
        *(_git(folder, "ls-files", "--others", "--exclude-standard", "--", ".") or "").splitlines(),
    ]
    changed = {Path(name).parts[0] for name in names}
    return [one for one in found if one.name in changed]


def check(submission: Path) -> int:
    """Install a submission's package, if it has one, and return the exit code of its check."""
    if (submission / "pyproject.toml").exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", str(submission)], check=True)
    words = [*SPARSEBP, "leaderboard", "check", str(submission), "--rerun", str(CELLS)]
    return subprocess.run(words, check=False).returncode


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None if it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """Check what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="origin/main", metavar="COMMIT", help="of the change; default: origin/main")
    parser.add_argument("--all", action="store_true", help="every submission, changed or not")
    arguments = parser.parse_args()
    chosen = find_submissions(FOLDER) if arguments.all else find_changed(arguments.since, FOLDER)
    codes = [check(submission) for submission in chosen]
    print(f"submissions: {len(chosen)} checked, {sum(map(bool, codes))} not accepted")
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main()
