"""Record a plan's code version and uncommitted changes, so that results can be traced to their code."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from sparsebp_cli.plan.repository import Repository

UNKNOWN = "unknown"


class LedgerMark(BaseModel):
    """The extent of a judge's ledger, so that lines removed from its end later are noticed."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    questions: int
    lines: int
    digest: str  # of the last line; it covers all earlier lines


class Provenance(BaseModel):
    """The origin of a plan. It never holds remotes, environment variables or command lines, which may hold secrets."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    sparsebp_version: str = ""  # of the package that made the plan
    recipe_file: str = ""  # name without its folder
    git_sha: str = ""  # commit of the working folder; empty outside git
    # digest of the uncommitted changes of all tracked files; empty if there are none, "unknown" if git failed
    git_diff_sha256: str = ""
    git_diff: str = ""  # text of the changes, in plans of earlier versions
    ledger: LedgerMark | None = None  # the ledger of the judge that requested the run; None: no judge

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out an absent ledger, so that workers of version 0.5 can read the plan."""
        content: dict[str, object] = handler(self)
        return content if self.ledger is not None else {k: v for k, v in content.items() if k != "ledger"}

    @property
    def dirty(self) -> bool:
        """Whether uncommitted changes are known to exist."""
        return bool(self.git_diff_sha256 or self.git_diff)


def find_provenance(recipe_file: Path) -> Provenance:
    """Describe the working folder of a recipe, without running anything configured there. The git fields are empty
    outside git."""
    found = Provenance(sparsebp_version=version("sparsebp"), recipe_file=recipe_file.name)
    repository = Repository.find(recipe_file.resolve().parent)
    if repository is None or not (sha := repository.head()):
        return found
    changes = repository.diff(sha)
    digest = UNKNOWN if changes is None else hashlib.sha256(changes).hexdigest() if changes else ""
    return found.model_copy(update={"git_sha": sha, "git_diff_sha256": digest})
