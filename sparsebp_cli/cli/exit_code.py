"""Define the meaning of the command's exit codes in one table, for ``--help``, documentation and ``schema --all``."""

from __future__ import annotations

EXIT_CODES = {
    0: "done",
    1: "a check failed (`doctor`, `targets check`, `study --from`), a condition was met (`compare --fail-if`, `audit "
    "--fail-if-*`), or `audit --write` wrote nothing",
    2: "wrong recipe, policy, data or usage; nothing was started",
    10: "`judge`: candidate and baseline are equal within the margin",
    11: "`judge`: the candidate was not shown to be better",
    12: "`judge`: the candidate is worse",
    100: "a run failed (`compare`: no run of a group finished), or the tracking store could not be used",
    101: "a run is not finished, or another process is writing it",
    102: "no run, or more than one, has the given name",
    103: "cancelled",
    104: "a run diverged: a loss, a gradient or a weight was not finite; its newest checkpoint is finite",
    130: "interrupted by Ctrl-C; runs wrote a checkpoint",
    143: "terminated by SIGTERM; runs wrote a checkpoint",
}
CHECK_FAILED = 1
NOT_FINISHED = 101
INTERRUPTED = {130, 143}
# These share the one line that `--help` has for them.
SHORT = (
    "Exit codes: 0 done, 1 a check failed or a condition was met, 2 wrong recipe or usage, 10 to 12 of `judge`, 100 "
    "failed, 101 not finished, 102 not found, 103 cancelled, 104 diverged, 130 and 143 interrupted."
)
