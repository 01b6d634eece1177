"""A folder with a study over several places, and its client as a real process; the worker trains nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, home, list_runs
from tests.target.conftest import until

from .conftest import BASE

HERE = str(Path(__file__).parent)
WORKER: dict[str, object] = {"worker": "study_worker", "env": {"PYTHONPATH": HERE}}  # options of a place elsewhere
MAIN = "from sparsebp_cli.cli.app import main; main()"
IMPATIENT = "from sparsebp_lab.study import driver; driver.PATIENCE_SECONDS = 0.0; "


@dataclass
class StudyFolder:
    """The study is ``tiny``; its trials on this machine and elsewhere have the same worker."""

    folder: Path

    def write(self, text: str, where: list[object], targets: dict[str, dict[str, object]], **tags: str) -> None:
        """Write a study over places, with named targets; the tags are for the worker."""
        given = ", ".join(f'{key}: "{value}"' for key, value in tags.items())
        base = BASE.format(test=", test_fraction: 0.5", tags=given) + "target: {kind: local, worker: study_worker}\n"
        (self.folder / "base.yaml").write_text(base)
        (self.folder / "targets.yaml").write_text(json.dumps(targets))
        (self.folder / "study.yaml").write_text(f"{text}where: {json.dumps(where)}\n")

    def start(self, *words: str, before: str = "") -> subprocess.Popen[str]:
        """Start the command line, by default the study; ``before`` is what its process does first."""
        return subprocess.Popen(
            [sys.executable, "-c", before + MAIN, *(words or ("study", "study.yaml"))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder, start_new_session=True,
            env=os.environ | {"PYTHONPATH": HERE, "SPARSEBP_TARGETS": str(self.folder / "targets.yaml")},
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run the command line to its end; return exit code, standard output and standard error."""
        client = self.start(*words)
        out, err = client.communicate()
        return client.returncode, out, err


def list_trials(role: str = "") -> list[RunFolder]:
    """Return the runs of the study's trials, in their order."""
    trials = json.loads((home() / "studies" / "tiny.json").read_text())["trials"]
    return [RunFolder(home() / "runs" / trial["run_id"]) for trial in trials if role in {"", trial["role"]}]


def find_place(run: RunFolder) -> str:
    """Return where a run works, by its plan: its host, or the kind of its target."""
    section = Plan.load(run.plan_file).recipe.target
    return str(section.options.get("host") or section.kind).removeprefix("ssh://")


def wait_for_held(place: str, count: int = 1) -> list[RunFolder]:
    """Wait until so many runs of a place have come to the step beyond which the worker is held; return them."""

    def find() -> list[RunFolder]:
        runs = [run for run in list_runs() if find_place(run) == place]
        return [run for run in runs if 2 in History.load(run.path).series("train/loss")]

    until(lambda: len(find()) >= count)
    return find()
