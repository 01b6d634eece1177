"""The common part of remote targets: a remote runner process on this machine, and jobs that send it requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, State, durable
from sparsebp_cli.target.contract import CheckResult, Job, Target
from sparsebp_cli.target.engine import TargetEngine
from sparsebp_cli.target.launch import POLL_SECONDS, Launch, RunHandle, start_process, wait_for_last_upload
from sparsebp_cli.target.remote_run import OVER, UNREACHABLE

DISPATCHER = "sparsebp_cli.target.dispatcher"
PATIENCE_SECONDS = 60.0  # longest wait of a cancellation for a target that does not answer


@final
class RemoteJob(RunHandle):
    """A remote job. Its requests are files in the run's folder that the remote runner reads."""

    def __init__(self, run: RunFolder, engine: TargetEngine) -> None:
        super().__init__(run)
        self._engine = engine

    def stop(self) -> None:
        if not self.status().over:
            durable.write_new(self._run.request_file, "stop")  # does not replace an earlier kill

    def kill(self) -> None:
        if not self.status().over:
            durable.write_file(self._run.request_file, "kill")

    def cancel(self, grace_seconds: float = 30.0) -> State:
        if self.status().over:
            return self.status()
        durable.write_file(self._run.cancel_file, str(grace_seconds))
        unreachable_since, before = time.monotonic(), self._last_attempt()
        is_outage = self.status() is State.UNREACHABLE  # otherwise a single answer that fails is no outage
        while not self.settled():
            latest = self._last_attempt()  # before the status, which must not be older
            if self.status() is not State.UNREACHABLE:
                unreachable_since, is_outage = time.monotonic(), False
            elif (is_outage and latest != before) or time.monotonic() - unreachable_since > PATIENCE_SECONDS:
                break  # the remote runner tried again in vain; it cancels the run as soon as the target answers
            time.sleep(POLL_SECONDS)
        return self.status()

    def _last_attempt(self) -> int:
        """Return when the remote runner last wrote what it knows of the target; 0 if never."""
        try:
            return self._run.target_file.stat().st_mtime_ns
        except OSError:
            return 0

    def fetch(self) -> Path:
        launch = Launch.load(self._run)
        if launch is not None and launch.handle and launch.sight != "over":
            self._engine.fetch(self._run, launch.handle)
        return self._run.path


class RemoteTarget(Target):
    """A target on another machine or in a container. Subclasses differ only in their engine and its options."""

    engine_class: ClassVar[type[Any]]

    def __init__(self, options: TargetOptions | None = None) -> None:
        """Create the engine. None means the default options."""
        self.engine: TargetEngine = self.engine_class(options or self.options_class())

    def command(self, run: RunFolder) -> list[str]:
        return self.engine.command(run)

    def files(self, run: RunFolder) -> dict[str, str]:
        return self.engine.files(run)

    def check_plan(self, plan: Plan) -> None:
        self.engine.check_plan(plan)

    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        for run in runs:
            self.check_plan(Plan.load(run.plan_file))
            wait_for_last_upload(run)
            if run.is_locked("target"):
                raise RunBusyError(f"run {run.run_id} is {run.state()}: another process is working on it")
        start_process(DISPATCHER, ["--max-parallel", str(max_parallel)], runs)
        return [RemoteJob(run, self.engine) for run in runs]

    def reattach(self, run: RunFolder) -> Job:
        """Return a job. If the remote runner died before the run was over, start another one."""
        launch = Launch.load(run)
        if launch is not None and launch.sight not in {"", "over"} and not run.is_locked("target"):
            with suppress(RunBusyError):  # another process started one in the meantime
                start_process(DISPATCHER, ["--adopt"], [run])
        return RemoteJob(run, self.engine)

    def recover(self, run: RunFolder) -> None:
        launch, state = Launch.load(run), run.state()
        if run.is_locked("target") or (launch is not None and launch.sight == OVER):
            return
        # Without a record of a start the run never left this machine, unless its event log shows otherwise.
        if launch is None and state is State.QUEUED:
            return
        if self.engine.find(run) is not None:
            Launch(0, 0, sight=UNREACHABLE).save(run)

    def check(self) -> Iterator[CheckResult]:
        yield from self.engine.check()
