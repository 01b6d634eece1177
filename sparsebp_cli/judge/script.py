"""A question about a user's own script: a command, as it is at two commits of a git repository."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.judge.question import Equal, Proposal
from sparsebp_cli.plan.plan import content_hash
from sparsebp_cli.run.metric import Metric

SEED, REPOSITORY = "{seed}", "{repository}"  # what a command may name


@dataclass(frozen=True)
class ScriptRepository:
    """The git repository that a command was typed in."""

    root: Path
    prefix: str  # the folder in it where the command runs, empty for its root

    @classmethod
    def find(cls, folder: Path) -> ScriptRepository:
        """Find the repository of a folder. Raises UsageError outside of one, or without git."""
        found = ask_git(folder, "rev-parse", "--show-toplevel", "--show-prefix")
        if found is None:
            raise UsageError(f"--script judges commits of a git repository, and {folder} is in none")
        root, prefix = (*found.split("\n"), "")[:2]
        return cls(Path(root), prefix)

    def find_commit(self, ref: str) -> str:
        """Return the commit that a branch, tag or commit names. Raises UsageError for another word."""
        found = ask_git(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        if found is None:
            known = ask_git(self.root, "for-each-ref", "--format=%(refname:short)") or ""
            raise UsageError(f"{self.root} has no commit {ref!r}{did_you_mean(ref, known.split())}")
        return found

    def find_tree(self, commit: str) -> str:
        """Return the digest of all files of a commit. Raises UsageError where some are in submodules."""
        if "\x00160000 " in "\x00" + (ask_git(self.root, "ls-tree", "-r", "-z", commit) or ""):
            raise UsageError(f"commit {commit[:12]} has submodules, which a judge does not check out")
        tree = ask_git(self.root, "rev-parse", f"{commit}^{{tree}}")
        assert tree is not None
        return tree

    @property
    def has_changes(self) -> bool:
        """Whether tracked files have changes that no commit has."""
        return bool(ask_git(self.root, "status", "--porcelain", "--untracked-files=no"))

    def check_out(self, commit: str, folder: Path) -> None:
        """Write the files of a commit into a folder of their own; the repository stays as it is."""
        words = ("clone", "--quiet", "--shared", "--no-checkout", "--", str(self.root), str(folder))
        if ask_git(self.root, *words) is None or ask_git(folder, "checkout", "--quiet", "--detach", commit) is None:
            raise UsageError(f"git could not check out commit {commit[:12]} of {self.root}")


def ask_git(folder: Path, *words: str) -> str | None:
    """Return what git prints, without the last newline; None if it fails. Raises UsageError without git."""
    # Whoever calls from a hook has git's own variables, which would name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", *words]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("--script needs git, which is not installed here") from None
    return done.stdout.decode(errors="replace").removesuffix("\n") if done.returncode == 0 else None


@dataclass(frozen=True)
class Script:
    """A command in a repository, one for both sides."""

    command: str
    repository: ScriptRepository

    def __post_init__(self) -> None:
        """Refuse a command without a place for the seed. Raises UsageError."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"--script: {error} in {self.command!r}") from None
        if not any(SEED in word for word in words):
            raise UsageError(f"--script must say where the seed goes: 'python train.py --seed {SEED}'")

    def words(self, seed: int) -> list[str]:
        """Return the words of the command with a seed."""
        values: Mapping[str, str] = {SEED: str(seed), REPOSITORY: str(self.repository.root)}
        found = shlex.split(self.command)  # before names are put in, which may have spaces
        for name, value in values.items():
            found = [word.replace(name, value) for word in found]
        return found

    def at(self, ref: str) -> ScriptSide:
        """Return the command as it is at a branch, tag or commit. Raises UsageError."""
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
    """A script at two commits. Each run is a whole command: what it spends is the script's own affair."""

    script: Script
    candidate: ScriptSide
    baseline: ScriptSide
    decisive: Metric
    equal: Equal = "command"

    def __post_init__(self) -> None:
        """Refuse two names of the same files. Raises UsageError."""
        self.check_alike()

    @cached_property
    def metric(self) -> Metric:
        """The metric that decides, as the script logs it."""
        return self.decisive

    @cached_property
    def digest(self) -> str:
        """What the ledger knows the question by: the direction too, which the user declares."""
        return content_hash({"question": super().digest, "better": self.decisive.better})

    @property
    def data(self) -> str | None:
        """None: nobody but the script knows its test split."""
        return None


def parse_metric(text: str) -> Metric:
    """Read ``val_loss:lower`` or ``accuracy:higher``; the direction is declared, never guessed. Raises UsageError."""
    name, _, better = text.rpartition(":")
    match better:
        case "lower" | "higher" if name:
            return Metric(name, better=better)
    raise UsageError(f"--metric must be NAME:lower or NAME:higher, such as val_loss:lower; got {text!r}")
