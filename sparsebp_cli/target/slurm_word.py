"""What Slurm says of a job, and what it means."""

from __future__ import annotations

import re

WAITING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "SUSPENDED",
    "RESV_DEL_HOLD",
}
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
SILENT = re.compile(
    r"unable to contact slurm|connection (refused|timed out)|socket timed out|communication connection failure"
    r"|transport endpoint|resource temporarily unavailable|unable to establish configuration source|munge",
    re.IGNORECASE,
)
REASONS = {
    "BOOT_FAIL": "the node did not boot",
    "CANCELLED": "cancelled in Slurm",
    "DEADLINE": "its deadline had come",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "killed for want of memory: see target.memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "its time limit had come: see target.timeout_min",
}


def read_code(code: int) -> int:
    """Return a process's exit code from a shell's: that of a signal is negative, but for those that a worker exits by.

    Args:
        code: From 0 to 255.

    Returns:
        From -127 to 255.
    """
    return 128 - code if code > 128 and code not in {130, 143} else code
