"""Trains what a task of the leaderboard misses, and archives it; `leaderboard.py` is the command.

A task is a study in `docs/results/leaderboard/v1`. It is trained from one clean commit: a checkout with uncommitted
changes is refused, and so are trials of another commit, since the id of a trial follows from the code. Runs are kept
below $SPARSEBP_HOME, by default in build/results/leaderboard-1; the archive of a task that is not done is there, too,
and goes to `docs/results/leaderboard/v1` when it is whole, with its values beside it (`thin.py`), which git keeps.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import yaml  # noqa: E402
from brought import SPARSEBP, fetch, put_back  # noqa: E402
from thin import KEPT, find_archive, thin  # noqa: E402

FOLDER = ROOT / "docs" / "results" / "leaderboard" / "v1"
LOOK_SECONDS = 20.0  # between looks at the clock, the commit and what can be removed
OLD_SECONDS = 60.0  # of a saved model: its run has ended
CONTROLS = ("dense", "dense-by-length", "dense-fused")


def find_tasks() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))["tasks"])


def find_commits_of(archive: Path) -> tuple[tuple[str, ...], str]:
    """Return the commits of the trials of an archive, and the digest of the examples of its report."""
    from sparsebp_cli.compare.archive import open_archive
    from sparsebp_cli.plan.seal import read_seal

    folder = open_archive(archive)
    (file,) = (folder / "studies").glob("*.json")
    trials = json.loads(file.read_text(encoding="utf-8"))["trials"]
    seals = {trial["run_id"]: read_seal(folder / "runs" / trial["run_id"]) for trial in trials}
    commits = sorted({seal.code.get("commit", "") for seal in seals.values() if seal is not None})
    reported = (seals[trial["run_id"]] for trial in trials if trial["role"] == "report")
    return tuple(commits), next((seal.data for seal in reported if seal is not None), "")


class Task:
    """A task's study, its runs and what was measured of its methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.file = FOLDER / f"{name}.yaml"
        self.study: dict[str, Any] = yaml.safe_load(self.file.read_text(encoding="utf-8"))
        self.archive = FOLDER / f"{name}.tar.gz"
        self.worth = FOLDER / f"{name}-worth.json"
        self.home = Path(os.environ.get("SPARSEBP_HOME", ROOT / "build" / "results" / "leaderboard-1"))
        self.part = self.home / f"{name}.tar.gz"  # of a task that is not done

    @property
    def record(self) -> dict[str, Any]:
        """The list of its trials; empty before the first."""
        file = self.home / "studies" / f"{self.study['study']}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands: one thread, as the prices in seconds of all tasks are."""
        return os.environ | {"SPARSEBP_HOME": str(self.home), "OMP_NUM_THREADS": "1"}

    def read_archive(self) -> None:
        """Put archived runs beside those that are here, so that the task goes on on another machine."""
        for archive in (find_archive(FOLDER / self.name), self.part):
            put_back(archive, self.home)

    def find_commits(self) -> set[str]:
        """Return the commits that its trials were trained from."""
        from sparsebp_cli.plan.seal import read_seal

        seals = (read_seal(self.home / "runs" / trial["run_id"]) for trial in self.record.get("trials", ()))
        return {seal.code.get("commit", "") for seal in seals if seal is not None}

    def fetch(self) -> None:
        """Download model and data of the task that are not here."""
        fetch(self.file.parent / self.study["base"], self.environment())

    def measure(self, end: float) -> None:
        """Write down what `sparsebp worth` predicts of each method, before it is trained."""
        known: dict[str, Any] = json.loads(self.worth.read_text(encoding="utf-8")) if self.worth.exists() else {}
        base = str(self.file.parent / self.study["base"])
        for arm, changes in self.study["arms"].items():
            if arm in known or arm in CONTROLS or time.monotonic() > end:
                continue
            own = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
            rate = self.study["vary"]["training.learning_rate"][0]
            words = ("worth", base, *own, "--set", f"training.learning_rate={rate}", "-o", "json")
            done = subprocess.run(
                [*SPARSEBP, *words], env=self.environment(), capture_output=True, text=True, check=False
            )
            if done.returncode < 0 or done.returncode > 128:  # stopped, so nothing is known
                return
            if done.returncode:
                known[arm] = {"refused": done.stderr.strip().splitlines()[-1]}
            else:
                found = [one for one in json.loads(done.stdout)["policies"] if one["name"] != "dense"]
                dropped = {"by_part"}
                known[arm] = (
                    {key: value for key, value in found[0].items() if key not in dropped}
                    if found
                    else {"refused": "no policy: its gradient is dense's"}
                )
            self.worth.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(f"{self.name}: measured {arm}", flush=True)

    def train(self, end: float) -> int:
        """Train what is missing until a time; return the exit code of the study, which goes on where it stood."""
        commit = find_commit()
        process = subprocess.Popen([*SPARSEBP, "study", str(self.file)], env=self.environment(), start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() > end or find_commit() != commit:
                    print(f"{self.name}: stopping; the same command goes on", flush=True)
                    process.send_signal(signal.SIGINT)
                    process.wait()
                    break
                try:
                    process.wait(min(LOOK_SECONDS, max(0.1, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    self.remove_models()
        except BaseException:  # Ctrl-C, too: what runs ends with a checkpoint
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        self.remove_models(0.0)
        return process.returncode

    def remove_models(self, older_than: float = OLD_SECONDS) -> None:
        """Remove saved models, 15 to 90 MB a run, which nobody reads."""
        for model in (self.home / "runs").glob("*/model"):
            if time.time() - model.stat().st_mtime >= older_than:
                shutil.rmtree(model, ignore_errors=True)

    def write_archive(self, *, whole: bool) -> None:
        """Archive all trials, rehearsals and tuning too. A part goes where git does not see it: the commit stays
        clean."""
        if self.record:
            place = self.archive if whole else self.part
            words = ("archive", f"@{self.study['study']}", "--thin", "--to", str(place))
            subprocess.run([*SPARSEBP, *words], env=self.environment(), check=True)
            if whole:
                thin(self.archive, FOLDER / f"{self.name}.parquet", KEPT["board"])
                self.part.unlink(missing_ok=True)


def run(task: Task, minutes: float) -> int:
    """Measure, train and archive what a task misses; return 0 when it is whole."""
    end = time.monotonic() + 60 * minutes
    if problem := next(find_problems(task), ""):
        print(f"error: {task.name}: {problem}", file=sys.stderr)
        return 2
    task.home.mkdir(parents=True, exist_ok=True)
    task.fetch()
    task.read_archive()
    if others := task.find_commits() - {find_commit()}:
        print(
            f"error: {task.name}: its trials are of commit {', '.join(sorted(others))}, and a task is trained from "
            "one: check that one out (`git worktree add FOLDER COMMIT`), or give another SPARSEBP_HOME and begin anew",
            file=sys.stderr,
        )
        return 2
    code = 1
    try:
        task.measure(end)
        code = task.train(end) if time.monotonic() < end else 1
    finally:  # also when it is interrupted
        from sparsebp_cli.errors import DivergedError

        code = 0 if code == DivergedError.exit_code else code  # all else is there, and to diverge is a result
        task.write_archive(whole=code == 0)
    return code


def find_problems(task: Task) -> Iterator[str]:
    """Yield what keeps a task from being trained."""
    from sparsebp_cli.plan import find_provenance

    found = find_provenance(task.file)
    if found.dirty:
        yield "the checkout has uncommitted changes, and rows are of one clean commit: commit or restore them"
    if not found.git_sha:
        yield "this is no checkout of git, and rows name their commit"


def find_commit() -> str:
    """Return the commit that is checked out."""
    from sparsebp_cli.plan.provenance import Repository

    repository = Repository.find(ROOT)
    return "" if repository is None else repository.head()


def run_all(names: list[str], minutes: float, say: Callable[[str], None] = print) -> int:
    """Run some tasks one after the other, in so many minutes in all."""
    begun, codes = time.monotonic(), {}
    for name in names:
        left = minutes - (time.monotonic() - begun) / 60
        if left > 0:
            codes[name] = run(Task(name), left)
    whole = [name for name, code in codes.items() if code == 0]
    say(
        f"whole: {', '.join(whole) or 'none'}; to go on with: {', '.join(n for n in names if n not in whole) or 'none'}"
    )
    return max(codes.values(), default=0)
