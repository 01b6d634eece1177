"""Read a submission: a folder with ``submission.yaml``, a study, its archive, and optionally a package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.policy.error_text import describe_kind
from sparsebp_cli.policy.field_error import describe_errors
from sparsebp_cli.recipe.check import first_error
from sparsebp_cli.recipe.document import read_document
from sparsebp_cli.recipe.loader import read_text
from sparsebp_cli.recipe.schema import Name, Section
from sparsebp_lab.leaderboard.rules import ARCHIVE, BoardRules

FILE = "submission.yaml"
Text = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]  # no path, so that no file outside is read


class About(Section):
    """The content of ``submission.yaml``."""

    task: Name = Field(description="The task whose study it is.")
    methods: Annotated[list[Name], Field(min_length=1)] = Field(description="The arms that are submitted.")
    authors: Annotated[list[Text], Field(min_length=1)] = Field(description="Who submits it.")
    licence: Text = Field(description="Licence of package, study and archive, by its SPDX name.")
    cites: Text = Field(description="The publication of the method, or where it is described: a line with a link.")
    package: str | None = Field(None, description="Name of the package with the policies; null: those that ship.")
    study: FileName = Field("study.yaml", description="The study, a file of the folder.")
    archive: FileName = Field("study.tar.gz", description="The archive of all of its trials, a file of the folder.")


@dataclass(frozen=True)
class Submission:
    """A study of a task with its archive and its authors."""

    task: str
    study: Path
    archive: Path
    methods: tuple[str, ...] = ()  # empty: all arms that are no controls
    about: About | None = None  # None: a row of this project


def read_submission(folder: Path) -> Submission:
    """Read the folder of a submission. Raise RecipeError with file, line and key for the first thing that is wrong."""
    file = folder / FILE
    tree = read_document(read_text(file), str(file))
    if tree is None:
        raise RecipeError(f"empty: it needs at least {', '.join(_required())}", file=str(file), line=1, column=1)
    data = tree.plain
    if not isinstance(data, dict):  # do not print the value: it may be a secret
        raise tree.place.error(f"a submission must be a mapping, got {describe_kind(data)}")
    try:
        about = About.model_validate(data)
    except ValidationError as error:
        raise first_error(tree, describe_errors(error, About, data)) from None
    return Submission(about.task, folder / about.study, folder / about.archive, tuple(about.methods), about)


def own_task(board: BoardRules, name: str) -> Submission:
    """Return a built-in task as a submission. Raise UsageError if there is no such task."""
    file = board.find_task(name)
    return Submission(name, file, file.with_name(f"{name}{ARCHIVE}"))


def _required() -> list[str]:
    return [name for name, field in About.model_fields.items() if field.is_required()]
