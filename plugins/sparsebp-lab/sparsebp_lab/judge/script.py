"""Ask a question about a user's script: a command at two commits of a git repository."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.plan.plan import content_hash
from sparsebp_cli.plan.repository import Repository, find_git
from sparsebp_cli.run.metric import Metric
from sparsebp_lab.judge.question import Equal, Proposal

SEED, REPOSITORY = "{seed}", "{repository}"  # placeholders that a command may contain


@dataclass(frozen=True)
class ScriptRepository:
    """The git repository in which the user typed a command."""

    repository: Repository
    prefix: str  # the folder in which the command runs, relative to the root; empty: the root

    @classmethod
    def find(cls, folder: Path) -> ScriptRepository:
        """Find the repository of a folder. Raises UsageError outside of one, or without git."""
        if find_git() is None:
            raise UsageError("--script needs git, which is not installed here")
        found = Repository.find(folder.resolve())
        if found is None:
            raise UsageError(f"--script compares commits of a git repository, but {folder} is not in one")
        prefix = folder.resolve().relative_to(found.folder).as_posix()
        return cls(found, "" if prefix == "." else f"{prefix}/")

    @property
    def root(self) -> Path:
        """Its top-level folder."""
        return self.repository.folder

    def find_commit(self, ref: str) -> str:
        """Return the commit of a branch, tag or commit; raise UsageError for another word."""
        if commit := self.repository.find_commit(ref):
            return commit
        raise UsageError(
            f"{self.root} has no branch, tag or commit {ref!r}{did_you_mean(ref, self.repository.list_references())}"
        )

    def find_tree(self, commit: str) -> str:
        """Return the digest of all files of a commit. Raises UsageError if a checkout would lack some of them."""
        if missing := self.repository.find_missing(commit):
            raise UsageError(f"cannot use commit {commit[:12]}: it has {missing}, which judge does not check out")
        if tree := self.repository.find_tree(commit):
            return tree
        raise UsageError(f"git could not read commit {commit[:12]} of {self.root}")

    @property
    def has_changes(self) -> bool:
        """Return whether tracked files have uncommitted changes."""
        return self.repository.diff(self.repository.head()) != b""

    def check_out(self, commit: str, folder: Path) -> None:
        """Write the files of a commit into a separate folder; the repository does not change."""
        if not self.repository.check_out(commit, folder):
            raise UsageError(f"git could not check out commit {commit[:12]} of {self.root}: try it there")


@dataclass(frozen=True)
class Script:
    """A command in a repository, one for both sides."""

    command: str
    repository: ScriptRepository

    def __post_init__(self) -> None:
        """Raise UsageError for a command without a place for the seed."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"--script: cannot split the command into words ({error}): {self.command!r}") from None
        if not any(SEED in word for word in words):
            raise UsageError(f"--script must contain {SEED} in place of the seed: 'python train.py --seed {SEED}'")

    def words(self, seed: int) -> list[str]:
        """Return the words of the command with a seed."""
        values: Mapping[str, str] = {SEED: str(seed), REPOSITORY: str(self.repository.root)}
        found = shlex.split(self.command)  # before placeholders are filled in, whose values may contain spaces
        for name, value in values.items():
            found = [word.replace(name, value) for word in found]
        return found

    def at(self, ref: str) -> ScriptSide:
        """Return the command at a branch, tag or commit. Raises UsageError."""
        commit = self.repository.find_commit(ref)
        content = {"command": self.command, "folder": self.repository.prefix, "tree": self.repository.find_tree(commit)}
        return ScriptSide(ref, commit, content_hash({"script": content}))


@dataclass(frozen=True)
class ScriptSide:
    """A script at a commit."""

    name: str  # as it was typed
    commit: str
    digest: str  # of the command and all files of the commit


@dataclass(frozen=True)
class ScriptProposal(Proposal):
    """A script at two commits. Each run is a whole command, and the script decides how much it spends."""

    script: Script
    candidate: ScriptSide
    baseline: ScriptSide
    decisive: Metric
    equal: Equal = "command"

    def __post_init__(self) -> None:
        """Raise UsageError if both names mean the same files."""
        self.check_alike()

    @cached_property
    def metric(self) -> Metric:
        """The deciding metric, as the script logs it."""
        return self.decisive

    @cached_property
    def digest(self) -> str:
        """The ledger's key of the question; it includes the direction that the user declares."""
        return content_hash({"question": super().digest, "better": self.decisive.better})

    @property
    def data(self) -> str | None:
        """None: the test split of a script is unknown."""
        return None


def parse_metric(text: str) -> Metric:
    """Read ``val_loss:lower`` or ``accuracy:higher``; the direction is declared, never guessed. Raises UsageError."""
    name, _, better = text.rpartition(":")
    match better:
        case "lower" | "higher" if name:
            return Metric(name, better=better)
    raise UsageError(f"--metric must be NAME:lower or NAME:higher, such as val_loss:lower; got {text!r}")
