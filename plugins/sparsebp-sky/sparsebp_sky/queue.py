"""Control managed jobs with the command line tool ``sky``."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsebp_cli.errors import RunFailedError, UnreachableError
from sparsebp_cli.target import CommandResult, Tool

PLACE = "SkyPilot"
ASK_SECONDS = 180.0  # the first request of a day may start SkyPilot's own server, or its controller
LAUNCH_SECONDS = 1200.0  # the very first launch starts the controller, which is a machine
USAGE = 2  # exit code for a command line that sky rejects
# There was never a controller, or it is gone with all of its jobs (seen with SkyPilot 0.14.1).
NO_JOBS = re.compile(r"ClusterDoesNotExist|No in-progress managed jobs", re.IGNORECASE)
# Permanent errors of the task or the account. After any other error the job may exist.
REFUSED = re.compile(
    r"\b(Storage(Spec|Source|Name|Mode|Init|BucketGet|BucketCreate|ExternalDeletion)Error|NoCloudAccessError|"
    r"ResourcesMismatchError|NotSupportedError|InvalidClusterNameError|InvalidSkyPilotConfigError|PoolDoesNotExistError|"
    r"UserRequestRejectedByPolicy|PermissionDeniedError|NoWorkspaceAccessError|ProvisionPrechecksError)\b"
)
WAITING = {"PENDING", "SUBMITTED", "STARTING", "RECOVERING"}
RUNNING = {"RUNNING", "WINDING_DOWN", "CANCELLING"}
FAILED = {"FAILED", "FAILED_SETUP", "FAILED_PRECHECKS", "FAILED_NO_RESOURCE", "FAILED_CONTROLLER"}
OVER = {"SUCCEEDED", "CANCELLED", *FAILED}


@dataclass(frozen=True)
class ManagedJob:
    """A managed job as listed by ``sky jobs queue``."""

    number: int
    name: str
    status: str  # such as RUNNING
    reason: str  # why it failed, one line; empty if SkyPilot gives no reason

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in OVER


class JobQueue:
    """The user's managed jobs."""

    def __init__(self) -> None:
        self._tool = Tool(PLACE, lambda _code, errors: NO_JOBS.search(errors) is not None, timeout_seconds=ASK_SECONDS)
        self._launcher = Tool(PLACE, _is_refused, timeout_seconds=LAUNCH_SECONDS)

    def version(self) -> str:
        """Return the version of ``sky``, as it prints it."""
        return self._tool.run(["sky", "--version"]).text

    def list(self) -> list[ManagedJob]:
        """Return all managed jobs, finished ones included; raises ``UnreachableError`` if the answer is no list."""
        # --refresh: the controller stops itself when idle, and knows how jobs ended; --verbose: their reasons.
        answer = self._tool.run(["sky", "jobs", "queue", "--all", "--refresh", "--verbose", "--output", "json"])
        if answer.code != 0:
            return []
        return [job for record in _find_list(answer) if (job := _read(record)) is not None]

    def launch(self, command: Sequence[str], task: str) -> None:
        """Submit a task with a command whose last word is a placeholder for the task's file. Raises ``RunFailedError``
        if it was refused, ``UnreachableError`` if the outcome is unknown."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(task)
            file.flush()
            answer = self._launcher.run([*command[:-1], file.name])
        if answer.code != 0:
            raise RunFailedError(f"SkyPilot refused the run: {answer.problem}")

    def cancel(self, job: ManagedJob) -> None:
        """End a managed job and its machine; a finished job stays unchanged."""
        self._tool.run(["sky", "jobs", "cancel", "--yes", str(job.number)])


def _is_refused(code: int, errors: str) -> bool:
    return code == USAGE or REFUSED.search(errors) is not None


def _find_list(answer: CommandResult) -> list[Any]:
    """Return the list in an answer; sky may print notices before it, about its server or a new version."""
    text = answer.out.decode(errors="replace")
    for begin in re.finditer(r"^\[", text, re.MULTILINE):
        try:
            found, end = json.JSONDecoder().raw_decode(text, begin.start())
        except ValueError:
            continue
        is_jobs = isinstance(found, list) and all(isinstance(record, dict) for record in found)
        if is_jobs and (found or not text[end:].strip()):
            return list(found)
    raise UnreachableError(f"cannot read the jobs of {PLACE}: sky jobs queue printed no list of jobs")


def _read(record: dict[str, Any]) -> ManagedJob | None:
    number, name, status = record.get("job_id"), record.get("job_name"), record.get("status")
    if not isinstance(number, int) or not isinstance(name, str) or not isinstance(status, str):
        return None  # not our job: ours have all three
    reason = record.get("failure_reason") or record.get("details") or ""
    return ManagedJob(number, name, status, " ".join(str(reason).split())[:300])
