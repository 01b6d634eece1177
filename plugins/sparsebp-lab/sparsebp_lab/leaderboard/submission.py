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

    task: Name = Field(description="The leaderboard task to which the submitted study belongs.")
    methods: Annotated[list[Name], Field(min_length=1)] = Field(
        description="Names of the study's arms that are submitted as methods."
    )
    authors: Annotated[list[Text], Field(min_length=1)] = Field(
        description="Names of the people or groups who submit the study."
    )
    licence: Text = Field(description="Licence of package, study and archive, as an SPDX name such as Apache-2.0.")
    cites: Text = Field(description="Publication or description of the method, in one line with a link.")
    package: str | None = Field(
        None,
        description=(
            "Name of the package that contains the policies; null: all policies come from SparseBP's own packages."
        ),
    )
    study: FileName = Field(
        "study.yaml", description="Name of the study's file, in the same folder as submission.yaml."
    )
    archive: FileName = Field(
        "study.tar.gz",
        description=(
            "Name of the archive that contains all trials of the study, in the same folder as submission.yaml."
        ),
    )


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
        raise RecipeError(
            (f"the file is empty, but it needs at least {', '.join(_required())}"), file=str(file), line=1, column=1
        )
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
