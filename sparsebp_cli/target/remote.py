"""What all targets elsewhere have in common: a process here that dispatches, and a grip on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.target.contract import Finding, Job, Target
from sparsebp_cli.target.engine import Engine
from sparsebp_cli.target.grip import POLL_SECONDS, FolderJob
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.start import start_process

DISPATCHER = "sparsebp_cli.target.dispatcher"
SENDING_SECONDS = 60.0
PATIENCE_SECONDS = 60.0  # for a place that does not answer, when something is asked of it


@final
class RemoteJob(FolderJob):
    """A grip on a run elsewhere: requests are files in the run's folder, which the dispatcher reads."""

    def __init__(self, run: RunFolder, engine: Engine) -> None:
        """Take the grip.

        Args:
            run: The run.
            engine: Where it is carried out.
        """
        super().__init__(run)
        self._engine = engine

    def stop(self) -> None:
        if not self.status().over:
            self._run.request_file.write_text("stop", encoding="utf-8")

    def kill(self) -> None:
        if not self.status().over:
            self._run.request_file.write_text("kill", encoding="utf-8")

    def cancel(self, grace_seconds: float = 30.0) -> State:
        if self.status().over:
            return self.status()
        part = self._run.cancel_file.with_suffix(".part")
        part.write_text(str(grace_seconds), encoding="utf-8")
        part.replace(self._run.cancel_file)
        lost = time.monotonic()
        while not self.settled():
            if self.status() is not State.UNREACHABLE:
                lost = time.monotonic()
            elif time.monotonic() - lost > PATIENCE_SECONDS:
                return self.status()  # it is cancelled as soon as its place answers
            time.sleep(POLL_SECONDS)
        return self.status()

    def fetch(self) -> Path:
        launch = Launch.load(self._run)
        if launch is not None and launch.handle and launch.sight != "over":
            self._engine.fetch(self._run, launch.handle)
        return self._run.path


class RemoteTarget(Target):
    """A place elsewhere. Its kinds differ in the engine only."""

    engine: Engine

    def command(self, run: RunFolder) -> list[str]:
        return self.engine.command(run)

    def files(self, run: RunFolder) -> dict[str, str]:
        return self.engine.files(run)

    def check_plan(self, plan: Plan) -> None:
        self.engine.check_plan(plan)

    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        for run in runs:
            self.check_plan(Plan.load(run.plan_file))
            deadline = time.monotonic() + SENDING_SECONDS
            while run.is_locked("target") and run.state().over and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if run.is_locked("target"):
                raise RunBusyError(f"run {run.run_id} is {run.state()}: another process takes care of it")
        start_process(DISPATCHER, ["--max-parallel", str(max_parallel)], runs)
        return [RemoteJob(run, self.engine) for run in runs]

    def reattach(self, run: RunFolder) -> Job:
        """Return a grip; a dispatcher is started again where the last one died before the run was over."""
        launch = Launch.load(run)
        if launch is not None and launch.sight not in {"", "over"} and not run.is_locked("target"):
            with suppress(RunBusyError):  # somebody was quicker
                start_process(DISPATCHER, ["--adopt"], [run])
        return RemoteJob(run, self.engine)

    def check(self) -> Iterator[Finding]:
        yield from self.engine.check()
