"""Base of the records with which commands answer. Tables for people and JSON for programs are both made from it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from sparsebp_cli.errors import RecipeError, SparseBPError, find_nearest

# A number that may be infinite or NaN. JSON cannot represent these, so documents have null.
Number = Annotated[float, WithJsonSchema({"type": ["number", "null"]})]


class Answer(BaseModel):
    """Facts that a command found. ``kind.py`` defines the name and version of each record."""

    # Defer building, so that no command loads other commands' records. Docstrings below fields are the schema's
    # descriptions.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True
    )


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
    """The differences, if a run has changed."""
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
