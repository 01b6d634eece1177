"""Print a command's answer: a table for people, or one JSON document on standard output for programs.

With ``-o json``, everything for people, such as progress, goes to standard error. Standard output has one document: the
command's answer, or the error that prevented it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TextIO, TypeVar

from sparsebp_cli.cli.answer.record import ErrorAnswer, Problem
from sparsebp_cli.cli.exit_code import INTERRUPTED
from sparsebp_cli.cli.screen import print_json, print_line

A = TypeVar("A")
JSON = "json"


def wants_json(words: Sequence[str]) -> bool:
    """Return whether the words of a command line request JSON. Words after ``--`` belong to another program. This runs
    before the words are parsed, because parse errors are reported as JSON too."""
    ours = list(words[: words.index("--")]) if "--" in words else list(words)
    if {"-h", "--help", "--version"} & set(ours):
        return False
    follows = any(
        second == JSON and (first == "--output" or (first[:1] == "-" != first[1:2] and first.endswith("o")))
        for first, second in pairwise(ours)
    )
    return follows or "--output=json" in ours or "-ojson" in ours


class Speech:
    """The answers of this process so far."""

    def __init__(self) -> None:
        """Answer for people until :meth:`in_json` is entered."""
        self._document: TextIO | None = None  # the real standard output, in JSON mode
        self._is_told = False
        self._warnings: list[str] = []

    @property
    def is_json(self) -> bool:
        """Whether the process answers in JSON."""
        return self._document is not None

    @contextmanager
    def in_json(self) -> Iterator[None]:
        """Send prints for people to standard error, and documents to standard output."""
        before = sys.stdout
        self._document, self._is_told, self._warnings = before, False, []
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            sys.stdout, self._document = before, None

    def tell(self, record: object) -> None:
        """Print a record as JSON, but only the first: later errors print a line and set the exit code."""
        if self.is_json and self._is_told:
            return
        from sparsebp_cli.cli.answer.kind import make_document

        self._is_told = True
        print_json(make_document(record, tuple(self._warnings)), self._document)

    def print(self, content: object) -> None:
        """Print JSON that is not a record, such as a schema, which has its own version."""
        self._is_told = True
        print_json(content, self._document)

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for the document."""
        self._warnings.append(text)
        print_line(f"warning: {text}", stderr=True)

    def end(self, exit_code: int) -> None:
        """Answer with an error if the command ended without an answer, as after a signal."""
        if self.is_json and not self._is_told:
            kind = "Interrupted" if exit_code in INTERRUPTED else "Exit"
            text = "the command ended before it had an answer; standard error shows the reason"
            self.tell(ErrorAnswer(error=Problem(type=kind, exit_code=exit_code, text=text)))


speech: Speech = Speech()


def tell(record: A, output: str, show: Callable[[A], object]) -> None:
    """Answer with a record: as JSON if ``output`` is ``json``, else through ``show``."""
    if output == JSON:
        speech.tell(record)
    else:
        show(record)


def warn(text: str) -> None:
    """Print a warning to standard error. A later document of ``-o json`` includes it too."""
    speech.warn(text)
