"""Run a user's script, each run in a separate checkout and with a separate MLflow run.

judge/scripts/RUN/judge.lock     held by the command that works on the run; the system releases it when it dies
                 checkout/       the files of the commit, until the run has finished
                 output.log      what the script printed
                 process.json    the process, and how far the ledger went
                 result.json     the last value of each metric, and the duration; written once
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.plan import LedgerMark
from sparsebp_cli.plan.plan import content_hash
from sparsebp_cli.run import durable, home
from sparsebp_lab.judge.ledger import SIDES
from sparsebp_lab.judge.script import ScriptProposal, ScriptSide
from sparsebp_lab.judge.script_run import ScriptRun

EXPERIMENT = "judge"


@dataclass(frozen=True)
class ScriptTrial:
    """A side with a seed."""

    arm: str
    side: ScriptSide
    seed: int

    @property
    def run_id(self) -> str:
        """Id derived from files, command and seed."""
        return content_hash({"script": self.side.digest, "seed": self.seed})

    @property
    def folder(self) -> Path:
        """Folder of the run's files."""
        return home() / "judge" / "scripts" / self.run_id


@dataclass(frozen=True)
class ScriptResult:
    """The result of a finished run."""

    metrics: Mapping[str, float | None]  # last value of each metric; None: not finite
    seconds: float
    mlflow_run: str


class ScriptArms:
    """Trials of a script at two commits."""

    def __init__(self, proposal: ScriptProposal) -> None:
        self.proposal = proposal
        self.mark: LedgerMark | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._problems: dict[str, str] = {}  # by run id, for runs of this command without a result

    def find_rehearsals(self) -> Sequence[ScriptTrial]:
        """Return none: a script decides itself when it ends."""
        return ()

    def make_trial(self, side: str, seed: int, *, test: bool = False) -> ScriptTrial:  # noqa: ARG002
        """Return a trial of a side; ``test`` has no effect, because the test split is unknown."""
        return ScriptTrial(
            side, dict(zip(SIDES, (self.proposal.baseline, self.proposal.candidate), strict=True))[side], seed
        )

    def is_done(self, trial: ScriptTrial) -> bool:
        """Return whether a trial has a result."""
        result = _find_result(trial)
        return result is not None and self.proposal.metric.name in result.metrics

    def train(self, trials: Sequence[ScriptTrial], pause: Callable[[], None]) -> None:
        """Run the script once for each trial without a result, one after the other."""
        for trial in trials:
            durable.make_folder(trial.folder, exist_ok=True)
            lock = FileLock(trial.folder / "judge.lock")
            while not (self._is_stopping or trial.run_id in self._problems or self.is_done(trial)):
                try:
                    lock.acquire(timeout=0)
                except Timeout:  # another command runs it, and its result will do
                    pause()
                    continue
                try:
                    if not self.is_done(trial):
                        self._run(trial, pause)
                finally:
                    lock.release()

    def stop(self) -> None:
        """Ask the script to end; its unfinished work is not kept."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the script at once."""
        self._signal(signal.SIGKILL)

    def find_unfinished(self, trials: Sequence[ScriptTrial]) -> list[str]:
        """Return a line on each trial that has no result."""
        return [
            f"the run of the {trial.arm} (seed {trial.seed}) {self._problems.get(trial.run_id, 'was not started')}"
            for trial in trials
            if not self.is_done(trial)
        ]

    def has_diverged(self, trial: ScriptTrial) -> bool:
        """Return whether a trial's metric is not finite."""
        result = _find_result(trial)
        return result is not None and result.metrics.get(self.proposal.metric.name, 0.0) is None

    def read(self, trial: ScriptTrial, metric: str = "") -> float | None:  # noqa: ARG002
        """Return the last value of the metric that decides."""
        result = _find_result(trial)
        return None if result is None else result.metrics.get(self.proposal.metric.name)

    def find_run(self, trial: ScriptTrial) -> str:
        """Return the id of a trial."""
        return trial.run_id

    def find_cost(self, trial: ScriptTrial) -> Mapping[str, float]:
        """Return the seconds of a finished run; its FLOPs are unknown."""
        result = _find_result(trial)
        return {"flops": 0.0, "seconds": 0.0 if result is None else result.seconds}

    def _run(self, trial: ScriptTrial, pause: Callable[[], None]) -> None:
        """Run a trial to its end or to a signal; the caller holds the lock."""
        _end_left(trial.folder)
        checkout = trial.folder / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        script = self.proposal.script
        script.repository.check_out(trial.side.commit, checkout)
        tags = {"sparsebp.judge.run": trial.run_id, "sparsebp.judge.side": trial.arm, "seed": str(trial.seed)}
        tags |= {"mlflow.source.git.commit": trial.side.commit}
        run = ScriptRun.create(EXPERIMENT, f"{trial.side.name} seed {trial.seed}", tags)
        began = time.monotonic()
        code = self._wait(trial, checkout / script.repository.prefix, run.environment, pause)
        seconds = time.monotonic() - began
        metrics = run.finish(failed=code != 0)
        if code != 0:
            ended = "was stopped" if self._is_stopping else f"ended with exit code {code}"
            self._problems[trial.run_id] = f"{ended}: see {trial.folder / 'output.log'}"
            return
        # Store all metrics, because another question may use another one of the same run. A value whose square
        # overflows has no spread, so it counts as not finite.
        finite = {name: value if math.isfinite(value * value) else None for name, value in metrics.items()}
        result = ScriptResult(finite, seconds, run.run_id)
        durable.write_file(trial.folder / "result.json", json.dumps(vars(result)))
        shutil.rmtree(checkout, ignore_errors=True)
        self._check_metric(trial, metrics)

    def _check_metric(self, trial: ScriptTrial, metrics: Mapping[str, float]) -> None:
        name = self.proposal.metric.name
        if name not in metrics:
            wrote = f"wrote {', '.join(sorted(metrics)[:10])}" if metrics else "wrote nothing into its MLflow run"
            hint = did_you_mean(name, metrics) if metrics else "; `mlflow.start_run()` finds this run by MLFLOW_RUN_ID"
            self._problems[trial.run_id] = f"{wrote}, and no metric {name}{hint}"

    def _wait(self, trial: ScriptTrial, folder: Path, environment: Mapping[str, str], pause: Callable[[], None]) -> int:
        """Start the script, and return its exit status."""
        words = self.proposal.script.words(trial.seed)
        with (trial.folder / "output.log").open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    words, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                where = f"commit {trial.side.commit[:12]}"
                raise UsageError(f"--script: {words[0]} cannot be started at {where}: {error.strerror}") from None
        started = {
            "pid": self._process.pid,
            "created": psutil.Process(self._process.pid).create_time(),
            "ledger": None if self.mark is None else self.mark.model_dump(),
        }
        durable.write_file(trial.folder / "process.json", json.dumps(started))
        if self._is_stopping:
            self.stop()
        while self._process.poll() is None:
            pause()
        return self._process.returncode

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _find_result(trial: ScriptTrial) -> ScriptResult | None:
    try:
        return ScriptResult(**json.loads((trial.folder / "result.json").read_text()))
    except FileNotFoundError:
        return None


def _end_left(folder: Path) -> None:
    """End the script that a killed judge left running, before it runs again."""
    with suppress(OSError, ValueError, LookupError, psutil.NoSuchProcess):
        started = json.loads((folder / "process.json").read_text())
        process = psutil.Process(int(started["pid"]))
        if process.create_time() == started["created"]:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
