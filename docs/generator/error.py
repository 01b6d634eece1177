"""The page of errors, from their classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generator.markdown import code, head, table, unwrap
from sparsebp_cli import errors
from sparsebp_cli.errors import SparseBPError

TEXT = """SparseBP prints an error that a user can cause as one line on standard error: what is wrong, the value got,
and what is allowed. Any other error is a defect of SparseBP: the line names a file with its traceback, and `--debug`
shows the traceback. Programs can rely on the exit codes."""

CODES = (
    ("0", "done"),
    ("1", "a check or a gate failed: `doctor`, `targets check`, `compare --fail-if`"),
    ("2", "wrong recipe, policy, data or usage; nothing was started"),
    ("100", "a run failed (`compare`: of a group, no run finished), or the tracking store could not be used"),
    ("101", "not finished, or being written by another process"),
    ("102", "no run, or more than one, has the given name"),
    ("103", "cancelled"),
    ("104", "a run diverged: a loss, a gradient or a weight was not finite; its newest checkpoint is finite"),
    ("130", "interrupted by Ctrl-C; runs wrote a checkpoint"),
    ("143", "terminated by SIGTERM; runs wrote a checkpoint"),
)


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    rows = [
        ("&nbsp;" * 4 * depth + code(kind.__name__), str(kind.exit_code), unwrap(kind.__doc__).split("\n")[0])
        for depth, kind in _walk(SparseBPError)
    ]
    known = {int(number) for number, _ in CODES}
    assert all(kind.exit_code in known for _, kind in _walk(SparseBPError)), "an exit code is not explained here"
    parts = [head("Errors and exit codes", TEXT), "## Exit codes\n", table(("code", "meaning"), CODES)]
    parts += ["## Errors\n", f"All are in `{errors.__name__}`; an indented class is a subclass of the one above it.\n"]
    return "\n".join([*parts, table(("error", "exit code", "meaning"), rows)])


def _walk(kind: type[SparseBPError], depth: int = 0) -> Iterator[tuple[int, type[SparseBPError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _walk(child, depth + 1)
