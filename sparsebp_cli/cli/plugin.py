"""Verbs of installed packages, by entry points of the group ``sparsebp.verbs``; each names a :class:`VerbEntry`."""

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
    """A verb of a package. Its module is imported whenever ``sparsebp`` starts, so that nothing heavy may stand at its
    top.

    Args:
        function: ``module:name`` of the function that Typer makes a command of; it has the name of the verb.
        panel: Heading of ``--help`` under which it stands.
        answers: For each kind of document that it answers with, ``module:name`` of the record, and its version;
            None: the record has a field ``schema``.
        writes: Whether it writes runs or the store.
        example: A use of it, without the word ``sparsebp``; ``--help`` ends with it.
        described: Further modules of the records' classes, whose docstrings describe the fields.
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


BROKEN: dict[str, str] = {}  # verbs of packages that could not be loaded, and why


@cache
def find_verbs() -> Mapping[str, VerbEntry]:
    """Return the verbs of packages by name, without their functions. One that is broken takes no other with it."""
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # a package may fail in any way
            note_broken(entry.name, error)
    return found


def note_broken(verb: str, error: Exception) -> None:
    """Keep why a verb is not there, for who calls it."""
    BROKEN[verb] = " ".join(f"{type(error).__name__}: {error}".split())


def load_verbs() -> Iterator[tuple[str, VerbEntry, Callable[..., None]]]:
    """Yield the verbs of packages with their functions."""
    for name, entry in find_verbs().items():
        try:
            yield name, entry, entry.load()
        except Exception as error:  # a package may fail in any way
            note_broken(name, error)
