"""Record a plan's code version and uncommitted changes, so that results can be traced to their code."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from sparsebp_cli.plan.repository import Repository

MAX_DIFF_CHARACTERS = 200_000
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
    # changes of imported files, at most 200,000 characters, if the recipe asks for them; older plans hold those of all
    # tracked files
    git_diff: str = ""
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


def find_provenance(recipe_file: Path, *, code_diff: bool = False) -> Provenance:
    """Describe the working folder of a recipe, without running anything configured there. With ``code_diff``, store the
    changes of the files that this process has imported. The git fields are empty outside git."""
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
    # Copy the modules first: reading an attribute of a lazy module may import others.
    files = {Path(file).resolve() for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    for file in sorted(file for file in files if file.is_relative_to(repository.folder)):
        name = str(file.relative_to(repository.folder))
        changes = (repository.diff(sha, name) or b"").decode(errors="replace")
        if kind := find_credential(changes):
            yield f"# the changes of {name} are left out: they may contain {kind}\n"
        else:
            yield changes


# Services document these prefixes so that scanners can find leaked credentials.
FORMS = {
    "a private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY",
    "a key of AWS": r"\b(AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    "a token of GitHub": r"\b(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a token of GitLab": r"\bgl(pat|ptt|dt|rt|soat|cbt|ft|agent)-[\w-]{20,}",
    "a token of Hugging Face": r"\b(hf|api_org)_[A-Za-z0-9]{20,}",
    "a key of an API": r"\b(sk|pk|rk)[-_]([a-z]+[-_])*[\w-]{16,}",
    "a key of Google": r"\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}",
    "a token of Slack": r"\bxox[abeoprs]-[\w-]{10,}",
    "a token of a package index": r"\b(pypi-[\w-]{16,}|npm_[A-Za-z0-9]{20,})",
    "a token of Weights & Biases": r"(?i)wandb.{0,40}\b[0-9a-f]{40}\b",
    "a JSON web token": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.",
    "a login in an address": r"://[^/\s:@'\"]*:[^\s@'\"]+@",
    "a login of a .netrc": r"(?i)\bmachine\s+\S+\s+login\s+\S+|\bpassword\s+\S{6,}$",
    "a password": r"(?i)[\w.-]*(passw(or)?d|passphrase|pwd|secret|token|(api|access|private)_?key|credential)s?[\w.-]*"
    r"['\"]?\]?\s*(:\s*\w+\s*)?(=|:|=>)\s*(['\"][^'\"\s]{4,}['\"]|[^'\"\s()\[\]{},.=]{6,}\s*$)",
    "a bearer token": r"(?i)\b(bearer|basic)\s+[\w+/.=-]{16,}",
}
_FORMS = [(name, re.compile(form, re.MULTILINE)) for name, form in FORMS.items()]


def find_credential(text: str) -> str:
    """Return the kind of credential that a text may contain, such as ``a token of GitHub``; empty if nothing looks like
    a credential. Doubtful texts count as credentials."""
    return next((name for name, form in _FORMS if form.search(text)), "")
