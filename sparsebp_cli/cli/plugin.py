"""Load commands of installed packages: each entry point of the group ``sparsebp.verbs`` names a :class:`VerbEntry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import final

from sparsebp_cli.entry_point import entry_points

GROUP = "sparsebp.verbs"


@final
@dataclass(frozen=True)
class VerbEntry:
    """A command of a package. Its module is imported whenever ``sparsebp`` starts, so it must import nothing heavy at
    its top.

    Args:
        function: ``module:name`` of the function from which Typer makes the command; it has the command's name.
        panel: Heading of ``--help`` under which the command is listed.
        answers: For each kind of document with which it answers, ``module:name`` of the record, and its version; None
            if the record has a field ``schema``.
        writes: Whether it writes runs or the store.
        example: Example without the word ``sparsebp``, shown at the end of ``--help``.
        described: Additional modules of the records' classes, whose docstrings describe the fields.
    """

    function: str
    panel: str
    answers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    writes: bool = False
    example: str = ""
    described: tuple[str, ...] = ()

    def load(self) -> Callable[..., None]:
        """Import the function."""
        module, _, name = self.function.partition(":")
        found: Callable[..., None] = getattr(import_module(module), name)
        return found


BROKEN: dict[str, str] = {}  # commands of packages that could not be loaded, and why


@cache
def find_verbs() -> Mapping[str, VerbEntry]:
    """Return the commands of packages by name; functions are not loaded. A broken one does not affect the others."""
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except (Exception, SystemExit) as error:  # a package may fail in any way
            note_broken(entry.name, error)
    return found


def note_broken(verb: str, error: BaseException) -> None:
    """Record why a command is missing, for users who call it."""
    BROKEN[verb] = " ".join(f"{type(error).__name__}: {error}".split())


def load_verbs() -> Iterator[tuple[str, VerbEntry, Callable[..., None]]]:
    """Yield the commands of packages with their functions."""
    for name, entry in find_verbs().items():
        try:
            yield name, entry, entry.load()
        except (Exception, SystemExit) as error:  # a package may fail in any way
            note_broken(name, error)
