"""Run the target ``sky``: one managed job of SkyPilot for each attempt, and a bucket folder of the same name.

The name follows from the run and from what is known of it here. So a repeated start after a lost answer has the same
name and finds the first job. Remote runners on two machines use two names; the older job continues.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, ClassVar, final

from sparsebp_cli.errors import RunBusyError, RunFailedError, SparseBPError, UnreachableError, UsageError
from sparsebp_cli.target import (
    CheckResult,
    Phase,
    Plan,
    RemoteTarget,
    RunFolder,
    TargetEngine,
    WorkerStatus,
    append_lines,
    find_sources,
    merge_into_run,
    pack,
    read_exit_code,
    receive,
    size_of,
)
from sparsebp_sky.bucket import Bucket
from sparsebp_sky.option import SkyOptions
from sparsebp_sky.queue import FAILED, RUNNING, WAITING, JobQueue, ManagedJob
from sparsebp_sky.task import FOLDER, make_task, to_text

PREFIX = "sparsebp"
HANDLE = re.compile(rf"{PREFIX}-[\w.-]+-[0-9a-f]{{8}}")
PART = re.compile(r"(journal|log)/([0-9]{15})b?")
REST = "whole/rest.tar"
WHOLE = re.compile(r"whole/(step-[0-9]+|rest)\.tar")
TERM = 15
FASTEST_SECONDS = 2.0


@final
class SkyEngine(TargetEngine):
    """Managed jobs; the handle of a run is the name of its job and of its folder in the bucket."""

    fastest_seconds: ClassVar[float] = FASTEST_SECONDS
    slowest_seconds: ClassVar[float] = 20.0

    def __init__(self, options: SkyOptions) -> None:
        """Store the options, the only state that an engine may have."""
        self._options = options
        self._queue = JobQueue()
        base = options.remote if options.remote.endswith((":", "/")) else f"{options.remote}/"
        self._bucket = Bucket(f"{base}{FOLDER}")
        # Per instance, so that users of a shared SkyPilot server can poll less often.
        self.fastest_seconds = min(FASTEST_SECONDS, options.poll_seconds)  # type: ignore[misc]
        self.slowest_seconds = options.poll_seconds  # type: ignore[misc]

    def command(self, run: RunFolder) -> list[str]:
        words = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", _name(run)]
        words += ["--pool", self._options.pool] if self._options.pool else []
        for name in self._options.secrets:  # names only: sky reads the values from its environment
            words += ["--secret", name]
        return [*words, "task.yaml"]

    def files(self, run: RunFolder) -> dict[str, str]:
        return {"task.yaml": to_text(make_task(self._options, run.run_id, _name(run)))}

    def check_plan(self, plan: Plan) -> None:
        for key, path in find_sources(plan.recipe).items():
            if path.startswith("/") and not any(_is_below(path, place) for place in self._options.mounts):
                parent = path.rpartition("/")[0] or path
                text = f"is on this machine; put it into a bucket: target.mounts: {{{parent}: 's3://BUCKET/FOLDER'}}"
                raise UsageError(f"{key}: {path} {text}")
        for name in self._options.secrets:
            if name not in os.environ:
                raise UsageError(f"target.secrets: the environment variable {name} is not set on this machine")

    def is_handle(self, text: str) -> bool:
        return HANDLE.fullmatch(text) is not None

    def find(self, run: RunFolder) -> str | None:
        folders = self._folders(run)
        # Without a folder the run left nothing there; SkyPilot lists finished jobs forever.
        jobs = [job for job in self._queue.list() if job.name in folders] if folders else []
        return min(jobs, key=lambda job: (job.over, job.number)).name if jobs else None

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:  # noqa: ARG002 - one run a call
        (run,) = runs
        name = _name(run)
        self._bucket.write(f"{name}/start.tar", lambda stream: pack(stream, run, run.run_id, more=("worker.log",)))
        try:
            self._queue.launch(self.command(run), self.files(run)["task.yaml"])
        except RunFailedError:
            self._bucket.remove(name)
            raise
        # A bucket has no locks: if two remote runners start a run at once, the older job continues.
        folders = self._folders(run)
        jobs = [job for job in self._queue.list() if job.name in {*folders, name}]
        mine = [job for job in jobs if job.name == name]
        if not mine:
            raise UnreachableError(f"SkyPilot accepted the run, but does not list its job {name} yet")
        first = min(job.number for job in mine)
        if any(not job.over and job.number < first for job in jobs if job.name != name):
            for job in mine:
                self._queue.cancel(job)
            self._bucket.remove(name)
            raise RunBusyError(f"run {run.run_id} already has a job in SkyPilot, which another remote runner started")
        return [name]

    def status(self, run: RunFolder, handle: str) -> WorkerStatus:  # noqa: ARG002 - the handle says which
        state = self._state(handle)
        if state.startswith("over"):
            return _read_over(state)
        job = self._find_job(handle)
        if job is None or job.over:
            state = self._state(handle)  # the state may have been written between the two requests
            if state.startswith("over"):
                return _read_over(state)
            return _read_end(job) if job else self._describe_loss(handle)
        if job.status in RUNNING:
            return WorkerStatus(Phase.WORKING if state == "working" else Phase.WAITING)
        if job.status in WAITING:
            return WorkerStatus(Phase.WAITING)
        raise UnreachableError(
            f"SkyPilot reports the status {job.status} for {handle}, which this version of SparseBP does not know"
        )

    def pull(self, run: RunFolder, handle: str) -> None:
        sizes = self._bucket.list(handle, deep=True)
        found = [match for name in sizes if (match := PART.fullmatch(name))]
        for kind, file in (("journal", run.journal_file), ("log", run.log_file)):
            for match in sorted((match for match in found if match[1] == kind), key=lambda match: match[0]):
                begin, here = int(match[2]), size_of(file)
                if begin <= here < begin + sizes[match[0]]:
                    append_lines(file, self._bucket.read(f"{handle}/{match[0]}", begin=here - begin))

    def signal(self, run: RunFolder, handle: str, number: int) -> None:  # noqa: ARG002 - the handle says which
        jobs = [job for job in self._queue.list() if job.name == handle and not job.over]
        if number == TERM and self._state(handle) == "working" and any(job.status in RUNNING for job in jobs):
            # SkyPilot's own cancel removes the machine at once, before a checkpoint could be made.
            self._bucket.put(f"{handle}/request", b"TERM")
            return
        for job in jobs:
            self._queue.cancel(job)

    def fetch(self, run: RunFolder, handle: str) -> None:
        self.pull(run, handle)
        scratch = RunFolder(run.path / ".part-sky")
        shutil.rmtree(scratch.path, ignore_errors=True)  # an interrupted fetch may have left one
        whole = scratch.path / "whole" / run.run_id
        whole.mkdir(parents=True)
        for name in sorted(filter(WHOLE.fullmatch, self._bucket.list(handle, deep=True))):
            place = whole if name == REST else whole / "checkpoints"
            self._bucket.receive(f"{handle}/{name}", partial(_unpack, scratch, place))
        merge_into_run(scratch.path / "whole", run.run_id, run)
        shutil.rmtree(scratch.path, ignore_errors=True)

    def release(self, run: RunFolder, handle: str) -> None:  # noqa: ARG002
        self._bucket.remove(handle)

    def check(self) -> Iterator[CheckResult]:
        try:
            yield CheckResult("ok", "sky", self._queue.version())
            jobs = self._queue.list()
            alive = sum(not job.over for job in jobs)
            yield CheckResult("ok", "jobs", f"{len(jobs)} managed jobs, {alive} of them not over")
        except SparseBPError as error:
            yield CheckResult("fail", "sky", str(error), "pip install skypilot; sky check")
        try:
            runs = self._bucket.list()
            yield CheckResult("ok", "bucket", f"{self._bucket.remote}: {len(runs)} runs in it")
        except SparseBPError as error:
            yield CheckResult("fail", "bucket", str(error), f"rclone lsf {self._options.remote}")
        for name in self._options.secrets:
            known = name in os.environ
            text = f"{name} is {'set' if known else 'not set'} in this environment"
            yield CheckResult("ok" if known else "fail", "secrets", text)

    def _folders(self, run: RunFolder) -> set[str]:
        """Return the names of all attempts of a run that the bucket has data of."""
        names = {name.removesuffix("/") for name in self._bucket.list() if name.endswith("/")}
        return {name for name in names if name.startswith(f"{PREFIX}-{run.run_id}-") and self.is_handle(name)}

    def _state(self, handle: str) -> str:
        return self._bucket.read(f"{handle}/state").decode("ascii", errors="replace").strip()

    def _find_job(self, handle: str) -> ManagedJob | None:
        """Return the job with this name. If a launch that seemed lost succeeded after all, there are two: the one that
        has claimed the run continues, or the older one, and the other is cancelled."""
        jobs = sorted((job for job in self._queue.list() if job.name == handle), key=lambda job: job.number)
        alive = [job for job in jobs if not job.over]
        if len(alive) > 1:
            owner = self._bucket.read(f"{handle}/owner").decode("ascii", errors="replace").strip()
            alive.sort(key=lambda job: (str(job.number) != owner, job.number))
            for job in alive[1:]:
                self._queue.cancel(job)
        return alive[0] if alive else jobs[-1] if jobs else None

    def _describe_loss(self, handle: str) -> WorkerStatus:
        gone = not self._bucket.list(handle, deep=True)
        return WorkerStatus(Phase.OVER, text="its managed job is gone from SkyPilot", gone=gone)


@final
class SkyTarget(RemoteTarget):
    """The target ``sky``."""

    options_class = SkyOptions
    engine_class = SkyEngine


def _name(run: RunFolder) -> str:
    """Return the name of a run's next job. It stays the same until something is known about that job's work."""
    known = f"{socket.gethostname()} {run.path.resolve()} {size_of(run.journal_file)}"
    return f"{PREFIX}-{run.run_id}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")


def _unpack(scratch: RunFolder, place: Path, stream: IO[bytes]) -> None:
    """Unpack one object, checked like all foreign content, into the scratch folder."""
    part = receive(stream, scratch)
    place.mkdir(exist_ok=True)
    for path in part.iterdir():
        if (place / path.name).exists():
            raise RunFailedError(f"the run's files were not fetched, because they contain {path.name} twice")
        path.rename(place / path.name)


def _read_over(state: str) -> WorkerStatus:
    code = state.partition(" ")[2]
    if not code.isdigit():
        raise UnreachableError(f"the state in the bucket must be `over` and an exit code, got {state[:100]!r}")
    return WorkerStatus(Phase.OVER, read_exit_code(int(code)))


def _read_end(job: ManagedJob) -> WorkerStatus:
    """Return the status of a job that ended without a report from the worker."""
    if job.status in FAILED:
        reason = f": {job.reason}" if job.reason else ""
        return WorkerStatus(Phase.OVER, text=f"SkyPilot: {job.status}{reason}; see sky jobs logs {job.number}")
    return WorkerStatus(Phase.OVER, text=f"SkyPilot: {job.status}, and the worker left no exit code")
