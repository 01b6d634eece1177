"""Base of the records with which commands answer. Tables for people and JSON for programs are both made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self, dataclass_transform

from sparsebp_cli.errors import RecipeError, SparseBPError, find_nearest


class OrNull:
    """Describe a number that JSON may not be able to represent."""

    def __get_pydantic_json_schema__(self, *_: object) -> dict[str, Any]:
        return {"type": ["number", "null"]}


# A number that may be infinite or NaN. JSON cannot represent these, so documents have null.
Number = Annotated[float, OrNull()]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Answer:
    """Facts that a command found, as a frozen dataclass with named arguments. ``kind.py`` defines the name and version
    of each record, and makes its JSON schema with pydantic; docstrings below fields are the schema's descriptions."""

    # Not a pydantic model: building those of all commands took a fifth of the time of ``sparsebp --help``.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    _new: ClassVar[list[type]] = []  # records that are no dataclasses yet: making all takes a tenth of ``--help``

    def __init_subclass__(cls) -> None:
        Answer._new.append(cls)

    def __new__(cls, *_: object, **__: object) -> Self:
        cls.complete()
        return super().__new__(cls)

    @staticmethod
    def complete() -> None:
        """Make each record a dataclass, before the first is made, read or described."""
        while Answer._new:
            dataclass(frozen=True, kw_only=True)(Answer._new.pop(0))

    @classmethod
    def read(cls, facts: Any) -> Self:
        """Return the record of plain values, such as another process has answered. Raise ValidationError if they are
        not its own."""
        from pydantic import TypeAdapter

        cls.complete()
        return TypeAdapter(cls).validate_python(facts)


class FieldChange(Answer):
    """A value that has changed."""

    field: str
    """Dotted name, such as ``training.seed``, ``code`` or ``data``."""
    then: str
    """Earlier value."""
    now: str
    """Current value."""


class Problem(Answer):
    """Why a command refused or failed."""

    type: str
    """Class of the error, as in the documentation of errors; ``Interrupted`` after a signal, ``Crash`` for a bug."""
    exit_code: int
    """Exit code of the error."""
    text: str
    """One line: what is wrong, the value got, what is allowed."""
    file: str | None = None
    """File with the problem, as given on the command line, or the ``--set KEY=VALUE``."""
    line: int | None = None
    """Line in the file, counted from 1."""
    column: int | None = None
    """Column in the line, counted from 1."""
    key: str | None = None
    """Dotted path of the wrong key: ``policy.0.keep``."""
    nearest: str | None = None
    """The nearest allowed name to the given one."""
    changes: tuple[FieldChange, ...] = ()
    """If a run has changed: the differences."""
    others: tuple[Problem, ...] = ()
    """Other problems of a recipe, in the order of the file."""

    @classmethod
    def of(cls, error: SparseBPError) -> Problem:
        """Return the facts of an error."""
        text = " ".join(str(error).split())
        facts: dict[str, Any] = {"nearest": find_nearest(text)}
        if isinstance(error, RecipeError):
            text = " ".join(error.text.split())
            facts |= {"file": error.file or None, "line": error.line or None, "column": error.column or None}
            facts |= {"key": error.key or None, "others": tuple(map(cls.of, error.others))}
        changes = getattr(error, "changes", ())
        facts["changes"] = tuple(FieldChange(field=field, then=then, now=now) for field, then, now in changes)
        return cls(type=type(error).__name__, exit_code=error.exit_code, text=text, **facts)


class ErrorAnswer(Answer):
    """The command failed. There is no other answer."""

    error: Problem
    """The reason."""


class Checked(Answer):
    """One property that was checked."""

    level: str
    """``ok``, ``warn`` (it still works) or ``fail``."""
    what: str
    """The property, such as ``disk``."""
    text: str
    """The finding."""
    hint: str
    """What to do; empty if nothing has to be done."""


class FileList(Answer):
    """Files that were written."""

    files: list[str]
    """Paths of the files, in the order in which they were written."""
    next: list[str]
    """Commands for the next steps."""
