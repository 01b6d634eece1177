"""The page of errors, from their classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generator.markdown import code, head, table, unwrap
from sparsebp_cli import errors
from sparsebp_cli.cli.exit_code import EXIT_CODES
from sparsebp_cli.errors import SparseBPError

TEXT = """SparseBP prints an error that a user can cause as one line on standard error: what is wrong, the value got,
and what is allowed. Any other error is a defect of SparseBP: the line names a file with its traceback, and `--debug`
shows the traceback. Programs can rely on the exit codes. With `-o json` an error is a [document](documents.md) of
the kind `error` on standard output, with file, line, key and the nearest name; the line is printed all the same."""


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    rows = [
        ("&nbsp;" * 4 * depth + code(kind.__name__), str(kind.exit_code), unwrap(kind.__doc__).split("\n")[0])
        for depth, kind in _walk(SparseBPError)
    ]
    rows_of_codes = [(str(number), meaning) for number, meaning in EXIT_CODES.items()]
    assert all(kind.exit_code in EXIT_CODES for _, kind in _walk(SparseBPError)), "an exit code is not explained here"
    parts = [head("Errors and exit codes", TEXT), "## Exit codes\n", table(("code", "meaning"), rows_of_codes)]
    parts += ["## Errors\n", f"All are in `{errors.__name__}`; an indented class is a subclass of the one above it.\n"]
    return "\n".join([*parts, table(("error", "exit code", "meaning"), rows)])


def _walk(kind: type[SparseBPError], depth: int = 0) -> Iterator[tuple[int, type[SparseBPError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _walk(child, depth + 1)
