"""What was on the machine that made a plan: code version and changes, so that a number can be traced back."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sparsebp_cli.plan.credential import find_credential
from sparsebp_cli.plan.repository import Repository

MAX_DIFF_CHARACTERS = 200_000
UNKNOWN = "unknown"


class Provenance(BaseModel):
    """Where a plan came from. Never holds remotes, environment variables or command lines: they carry secrets.

    Args:
        sparsebp_version: Of the package that made the plan.
        recipe_file: Name of the recipe's file, without its folder.
        git_sha: Commit of the working folder; empty outside git.
        git_diff_sha256: Digest of the uncommitted changes of all tracked files; empty where there were none,
            ``unknown`` where git could not tell.
        git_diff: The changes themselves, of the files that Python had imported, cut at 200,000 characters: only where
            the recipe asks for them. Plans of earlier versions hold those of all tracked files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sparsebp_version: str = ""
    recipe_file: str = ""
    git_sha: str = ""
    git_diff_sha256: str = ""
    git_diff: str = ""

    @property
    def dirty(self) -> bool:
        """Whether there were uncommitted changes, as far as is known."""
        return bool(self.git_diff_sha256 or self.git_diff)


def find_provenance(recipe_file: Path, *, code_diff: bool = False) -> Provenance:
    """Describe the working folder that a recipe is run from. Nothing that is configured there is run.

    Args:
        recipe_file: The recipe.
        code_diff: Whether the text of changes is kept, of files that this process has imported.

    Returns:
        Its provenance; the git fields are empty where there is no git.
    """
    found = Provenance(sparsebp_version=version("sparsebp"), recipe_file=recipe_file.name)
    repository = Repository.find(recipe_file.resolve().parent)
    if repository is None or not (sha := repository.head()):
        return found
    changes = repository.diff(sha)
    digest = UNKNOWN if changes is None else hashlib.sha256(changes).hexdigest() if changes else ""
    text = "".join(_tell_changes(repository, sha)) if code_diff and changes else ""
    return found.model_copy(update={"git_sha": sha, "git_diff_sha256": digest, "git_diff": text[:MAX_DIFF_CHARACTERS]})


def _tell_changes(repository: Repository, sha: str) -> Iterator[str]:
    """Yield the changes of each imported file; one with something like a credential in it is named only."""
    files = {Path(file).resolve() for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    for file in sorted(file for file in files if file.is_relative_to(repository.folder)):
        name = str(file.relative_to(repository.folder))
        changes = (repository.diff(sha, name) or b"").decode(errors="replace")
        if kind := find_credential(changes):
            yield f"# the changes of {name} are left out: {kind} may be in them\n"
        else:
            yield changes
