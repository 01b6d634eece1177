"""Code version and uncommitted changes on the machine that made a plan, so that a number can be traced to its code."""

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
    """The origin of a plan. It never holds remotes, environment variables or command lines, which may contain
    secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sparsebp_version: str = ""  # of the package that made the plan
    recipe_file: str = ""  # name without its folder
    git_sha: str = ""  # commit of the working folder; empty outside git
    # digest of the uncommitted changes of all tracked files; empty if there are none, "unknown" if git failed
    git_diff_sha256: str = ""
    # the changes of imported files, cut at 200,000 characters, if the recipe asks for them; plans of earlier versions
    # hold those of all tracked files
    git_diff: str = ""

    @property
    def dirty(self) -> bool:
        """Whether there were uncommitted changes, as far as is known."""
        return bool(self.git_diff_sha256 or self.git_diff)


def find_provenance(recipe_file: Path, *, code_diff: bool = False) -> Provenance:
    """Describe the working folder of a recipe, without running anything that is configured there. ``code_diff`` stores
    the text of changes of files that this process has imported. The git fields are empty outside git."""
    found = Provenance(sparsebp_version=version("sparsebp"), recipe_file=recipe_file.name)
    repository = Repository.find(recipe_file.resolve().parent)
    if repository is None or not (sha := repository.head()):
        return found
    changes = repository.diff(sha)
    digest = UNKNOWN if changes is None else hashlib.sha256(changes).hexdigest() if changes else ""
    text = "".join(_tell_changes(repository, sha)) if code_diff and changes else ""
    return found.model_copy(update={"git_sha": sha, "git_diff_sha256": digest, "git_diff": text[:MAX_DIFF_CHARACTERS]})


def _tell_changes(repository: Repository, sha: str) -> Iterator[str]:
    """Yield the changes of each imported file. A file whose changes may contain a credential is only named."""
    files = {Path(file).resolve() for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    for file in sorted(file for file in files if file.is_relative_to(repository.folder)):
        name = str(file.relative_to(repository.folder))
        changes = (repository.diff(sha, name) or b"").decode(errors="replace")
        if kind := find_credential(changes):
            yield f"# the changes of {name} are left out: they may contain {kind}\n"
        else:
            yield changes
