"""The base of the records that verbs answer with: tables for people and JSON for programs are made from the same."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from sparsebp_cli.errors import RecipeError, SparseBPError, find_nearest

# A number that may be infinite or none at all, for which JSON has no word: a document has null there.
Number = Annotated[float, WithJsonSchema({"type": ["number", "null"]})]


class Answer(BaseModel):
    """Facts that a verb found. ``kind.py`` has the name and the version of each."""

    # Deferred: no verb pays for the records of the others. The schema's descriptions are the docstrings below fields.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True
    )


class FieldChange(Answer):
    """A value that is not what it was."""

    field: str
    """Dotted name, such as ``training.seed``, ``code`` or ``data``."""
    then: str
    """Its value then."""
    now: str
    """Its value now."""


class Problem(Answer):
    """Why something was refused or failed."""

    type: str
    """Class of the error, as the page of errors lists it; ``Interrupted`` after a signal, ``Crash`` for a defect."""
    exit_code: int
    """Exit code of the error."""
    text: str
    """One line: what is wrong, the value got, what is allowed."""
    file: str | None = None
    """File that is wrong, as it was given, or the ``--set KEY=VALUE``."""
    line: int | None = None
    """Line in the file, counted from 1."""
    column: int | None = None
    """Column in the line, counted from 1."""
    key: str | None = None
    """Dotted path of the key that is wrong: ``policy.0.keep``."""
    nearest: str | None = None
    """The accepted name that is nearest to the one that was given."""
    changes: tuple[FieldChange, ...] = ()
    """What differs, where a run is not what it was."""
    others: tuple[Problem, ...] = ()
    """What else is wrong with a recipe, in the order of the file."""

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
    """The verb failed; nothing else is answered."""

    error: Problem
    """Why."""


class Checked(Answer):
    """One property that was checked."""

    level: str
    """``ok``, ``warn`` (it works all the same) or ``fail``."""
    what: str
    """The property, such as ``disk``."""
    text: str
    """What was found."""
    hint: str
    """What to do; empty where nothing has to be done."""


class FileList(Answer):
    """Files that were written."""

    files: list[str]
    """Their paths, in the order in which they were written."""
    next: list[str]
    """Commands that go on from here."""
