"""The tool ``study`` of the entry-point group ``sparsebp.tools``: functions for the core, without heavy imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsebp_cli.cli.answer.recipe_record import CheckedStudy
    from sparsebp_cli.compare import Comparison
    from sparsebp_cli.compare.grid import Grid
    from sparsebp_cli.plan import Plan
    from sparsebp_lab.study.record import StudyRecord
    from sparsebp_lab.study.selection import StudySelection


def is_study(file: Path) -> bool:
    """Return whether a file holds a study; for an unreadable file False, because its next reader reports the error."""
    from sparsebp_cli.errors import RecipeError
    from sparsebp_cli.recipe.document import read_document
    from sparsebp_cli.recipe.loader import read_text

    try:
        tree = read_document(read_text(file), str(file))
    except RecipeError:
        return False
    return tree is not None and isinstance(tree.content, dict) and "study" in tree.content


def check(file: Path, changes: list[str], look: Callable[..., list[str]]) -> Iterator[CheckedStudy]:
    """Yield a study and its small form, both checked and printed."""
    from sparsebp_cli.cli.screen import print_line
    from sparsebp_lab.verb.study_check import check_study, describe

    for found in check_study(file, changes, look):
        for line in describe(found):
            print_line(line)
        yield found


def make_plans(file: Path) -> list[Plan]:
    """Return a plan for each arm of a study, with its first combination."""
    from sparsebp_lab.verb import study_check

    return study_check.make_plans(file)


def make_schema() -> dict[str, Any]:
    """Return the JSON schema of a study's file."""
    from sparsebp_lab.study.schema import study_schema

    return study_schema()


def load(name: str, place: Path | None = None) -> StudyRecord | None:
    """Return the list of a study on this machine, or in an archive's folder; None if there is none."""
    from sparsebp_lab.study.record import StudyRecord

    return StudyRecord.load(name, place)


def find(name: str) -> StudyRecord:
    """Return the list of a study; raise RunNotFoundError if this machine has no study of that name."""
    from sparsebp_lab.study.record import find_record

    return find_record(name)


def select(name: str, place: Path | None = None) -> StudySelection:
    """Read the runs of a study from this machine, or from the folder of an archive."""
    from sparsebp_lab.study import selection
    from sparsebp_lab.study.record import find_archived, find_record

    return selection.select(find_record(name) if place is None else find_archived(name, place), place)


def make_grids(found: StudySelection, comparison: Comparison) -> list[Grid]:
    """Return the tables of a study for the comparison of its runs: published numbers, and its tuning. It chose the
    runs, but its own runs are in none of their numbers."""
    from sparsebp_lab.study import tuning as tables

    return [*found.make_claims(comparison), *tables.make_tuning_grids(found.tuning)]


def thin_journal(journal: bytes) -> bytes:
    """Return an event log without measurements of single steps."""
    from sparsebp_lab.study import thin

    return thin.thin_journal(journal)
