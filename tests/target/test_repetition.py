"""A job that is put back by itself is put back a counted number of times, whatever it leaves behind, and says why."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.run import RunFolder
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.engine import LOST_CODE, MOST_RESTARTS, Phase
from sparsebp_cli.target.slurm import IDLE, SlurmEngine
from tests.target.conftest import make_run

pytestmark = pytest.mark.promise("R30")

# The n-th job does what line n of "story" says, or the last line; then it is warned, and ends as the worker does.
WORKER = """#!/bin/bash
run=${!#}; run=${run%/plan.json}
echo job >> "$run/jobs"
trap 'exit 143' TERM
line=$(sed -n "$(wc -l < "$run/jobs")p" "$run/story"); eval "${line:-$(tail -n 1 "$run/story")}"
kill -USR1 $(cat "$run/batch")
sleep 5 & wait
"""
# Of Slurm: the commands that the script calls. A job is put back by the test, which runs the script again.
TOOLS = {
    "scontrol": 'case $1 in requeue) echo "$2" >> "$FOLDER/asked"; exit 1;; esac',
    "scancel": 'kill -TERM $(cat "$FOLDER/step")',
    "srun": 'echo $$ > "$FOLDER/step"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "apptainer": 'shift\nwhile [[ $1 == --* ]]; do shift 2; done\nshift; exec "$@"',
}
CHECKPOINT = 'mkdir -p "$run/checkpoints/step-0000000{}"'
EACH = 'mkdir -p "$run/checkpoints/step-$(printf %08d $(wc -l < "$run/jobs"))"'
LOST = f"exit {LOST_CODE}"
AGAIN = MOST_RESTARTS + 1  # jobs in a row of which none makes a checkpoint


class Jobs:
    """A job without Slurm: its script is run again for as long as it asks to be put back."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.run, self.tools = folder, folder / "run", folder / "tools"
        (self.run / "checkpoints").mkdir(parents=True)
        self.tools.mkdir()
        for name, text in (TOOLS | {"worker": WORKER.removeprefix("#!/bin/bash\n")}).items():
            (self.tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.tools / name).chmod(0o755)
        self.options = SlurmOptions.model_validate({"python": str(self.tools / "worker")} | options)

    def work(self, story: Sequence[str], most: int = 12, task: int | None = None) -> int:
        """Run jobs until one is not put back, at most so many; return how many there were."""
        runs = [str(self.run)] if task is None else [*("/nowhere/run",) * task, str(self.run)]
        script = render_script(self.options, runs)
        variables = {"PATH": f"{self.tools}:/usr/bin:/bin", "FOLDER": str(self.folder), "SLURM_JOB_ID": "7"}
        if task is not None:
            variables |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": str(task)}
        (self.run / "story").write_text("\n".join(story) + "\n")
        for number in range(most):
            asked = self.num_asked()
            batch = f'echo $$ > "{self.run}/batch"; exec bash -s'
            given = variables | {"SLURM_RESTART_COUNT": str(number)}
            subprocess.run(["bash", "-c", batch], input=script, text=True, env=given, timeout=25, check=False)
            if self.num_asked() == asked:
                return number + 1
        return most

    def num_asked(self) -> int:
        file = self.folder / "asked"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def ending(self) -> list[str]:
        """The key, the exit code and, where it was put back too often, ``idle``."""
        return (self.run / "slurm-exit").read_text().split()


STORIES: dict[str, tuple[Sequence[str], int]] = {
    "no checkpoint at all": ([":"], AGAIN),
    "one checkpoint, in the third job": ([":", ":", CHECKPOINT.format(4), ":"], 3 + MOST_RESTARTS),
    "one checkpoint, in the last job that may be without": (
        [":", ":", ":", CHECKPOINT.format(4)],
        AGAIN + MOST_RESTARTS,
    ),
    "two checkpoints, each late": (
        [":", ":", CHECKPOINT.format(4), ":", ":", CHECKPOINT.format(8), ":"],
        6 + MOST_RESTARTS,
    ),
    "checkpoints that were not finished": ([EACH.replace("step-", ".part-")], AGAIN),
    "the same checkpoint again and again": ([CHECKPOINT.format(4)], AGAIN),
    "an older checkpoint after a newer one": ([CHECKPOINT.format(8), CHECKPOINT.format(4)], AGAIN),
    "a count that is rubbish": (['echo "x y z" > "$run/slurm-idle"'], AGAIN),
    "a count that is empty": ([': > "$run/slurm-idle"'], AGAIN),
    "a count that is a command": (["echo 'none a[$(touch $run/hit)]' > \"$run/slurm-idle\""], AGAIN),
    "a count that cannot be written": (['mkdir -p "$run/slurm-idle"'], AGAIN),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_warned_job_is_put_back_until_it_makes_no_progress(tmp_path: Path, name: str) -> None:
    story, wanted = STORIES[name]
    jobs = Jobs(tmp_path)
    assert jobs.work(story) == wanted
    assert jobs.ending == ["7", "143", "idle"]
    assert not (jobs.run / "hit").exists()


@pytest.mark.parametrize("story", [[EACH], [":", ":", EACH, ":", ":", EACH, ":", ":", EACH, ":", ":", EACH]])
def test_a_job_that_makes_checkpoints_is_put_back_each_time(tmp_path: Path, story: Sequence[str]) -> None:
    jobs = Jobs(tmp_path)
    assert jobs.work(story) == 12
    assert jobs.num_asked() == 12


OPTIONS: dict[str, dict[str, Any]] = {
    "two nodes": {"nodes": 2, "processes": 2},
    "two nodes of four processors": {"nodes": 2, "processes": 2, "cpus": 4},
    "apptainer": {"container": "apptainer", "image": "/images/a.sif"},
    "pyxis": {"container": "pyxis", "image": "a"},
    "names of ours in setup": {"setup": ["export times=-99 before=none newest=x idle= again=", "set -eu"]},
    "names of ours in the environment": {"env": {"times": "-99", "idle": "", "newest": "x"}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_changes_how_often_a_job_is_put_back(tmp_path: Path, name: str) -> None:
    jobs = Jobs(tmp_path, **OPTIONS[name])
    assert jobs.work([":"]) == AGAIN
    assert jobs.ending == ["7", "143", "idle"]


def test_each_run_of_an_array_has_its_own_count(tmp_path: Path) -> None:
    for task in (0, 1):
        (tmp_path / str(task)).mkdir()
        jobs = Jobs(tmp_path / str(task))
        assert jobs.work([":"], task=task) == AGAIN
        assert jobs.ending == [f"6_{task}", "143", "idle"]


@pytest.mark.parametrize("story", [[LOST], [LOST, ":", LOST, ":", LOST, LOST], [":", LOST, ":", LOST, LOST]])
def test_a_run_that_loses_a_node_each_time_is_put_back_a_few_times(tmp_path: Path, story: Sequence[str]) -> None:
    jobs = Jobs(tmp_path, nodes=2, processes=2)
    assert jobs.work(story) <= 2 * AGAIN
    assert jobs.ending[:1] == ["7"]


def test_a_pod_starts_its_worker_again_a_few_times(tmp_path: Path) -> None:
    program = 'import pathlib, sys\nwith open(sys.argv[1] + ".starts", "a") as file: file.write("x")\nsys.exit(4)\n'
    (tmp_path / "lost_always.py").write_text(program)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".go").touch()
    words = [sys.executable, "-m", "sparsebp_cli.target.relay", "lost_always", str(folder), "0"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=100, check=False)
    assert done.returncode == LOST_CODE
    assert (folder / "plan.json.starts").read_text() == "x" * AGAIN
    assert (folder / ".state").read_text() == f"over {LOST_CODE}"


def test_a_run_that_was_told_to_stop_or_may_not_go_back_is_not_put_back(tmp_path: Path) -> None:
    for name, options in (("stop", {}), ("off", {"requeue": False})):
        (tmp_path / name).mkdir()
        jobs = Jobs(tmp_path / name, **options)
        if name == "stop":
            (jobs.run / "slurm-stop").touch()
        assert jobs.work([":"]) == 1
        assert jobs.num_asked() == 0
        assert jobs.ending == ["7", "143"]


LIMITS = [(minutes, seconds) for minutes, seconds in itertools.product((1, 2, 5), (10, 59, 60, 119, 120, 300, 3600))]


def test_a_warning_that_comes_at_the_start_is_refused(record_property: Any) -> None:
    for minutes, seconds in LIMITS:
        if 60 * minutes <= seconds:
            wanted = f"must be below the time limit, {60 * minutes} seconds .*, got {seconds}"
            with pytest.raises(ValueError, match=wanted):
                SlurmOptions(timeout_min=minutes, warning_seconds=seconds)
            SlurmOptions(timeout_min=minutes, warning_seconds=seconds, requeue=False)
        else:
            SlurmOptions(timeout_min=minutes, warning_seconds=seconds)
    record_property("trials", len(LIMITS))


def test_who_looks_is_told_that_the_job_was_put_back_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: RunFolder = make_run()
    (tmp_path / "squeue").write_text("#!/bin/sh\necho COMPLETED\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (run.path / "slurm-exit").write_text("7 143 idle\n")
    found = SlurmEngine(SlurmOptions()).status(run, "7")
    assert (found.phase, found.exit_code, found.text) == (Phase.OVER, 143, IDLE)
