"""Read git repositories that may come from a stranger. No other module calls git; a test checks this.

Git runs programs that a repository's configuration names: monitors, filters, hooks, pagers, diff drivers. So each call
uses a temporary git folder that shares only objects, references and index with the repository, and an environment
without git's variables.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sparsebp_cli.run.budget import read_bounded

TIMEOUT_SECONDS = 10.0  # a hostile object or reference may be a pipe
CHECKOUT_SECONDS = 600.0
LARGEST_FILE_BYTES = 64 * 1024 * 1024  # of references, including packed ones
LARGEST_INDEX_BYTES = 256 * 1024 * 1024
SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REFERENCE = re.compile(r"refs/[^\x00-\x20~^:?*\[\\\x7f]+")
# Git compares files above bigFileThreshold by digest only.
CONFIG = "[core]\n\trepositoryformatversion = {}\n\tbare = false\n\tbigFileThreshold = 16m\n"
SHA256 = "[extensions]\n\tobjectFormat = sha256\n"  # needs version 1 of the format


@dataclass(frozen=True)
class Repository:
    """A working folder under git."""

    folder: Path  # the top folder, resolved
    own: Path  # contains HEAD and index of this working folder
    common: Path  # contains references and objects; differs from own in a worktree

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the repository that contains a folder, or None."""
        for top in (folder, *folder.parents):
            if (top / ".git").is_dir() or _read_text(top / ".git"):
                return cls.at(top)
        return None

    @classmethod
    def at(cls, top: Path) -> Self | None:
        """Return the repository whose top folder this is, or None."""
        place = top / ".git"
        if place.is_dir():
            return cls(top, place, place)
        own = top / _read_text(place).removeprefix("gitdir:").strip()  # the git folder of a worktree or submodule
        common = _read_text(own / "commondir")
        return cls(top, own, own / common if common else own) if own != top and own.is_dir() else None

    def head(self) -> str:
        """Return the commit, 40 or 64 digits; empty if there is none yet or it cannot be read."""
        text = _read_text(self.own / "HEAD")
        for _ in range(5):  # a symbolic reference may name another one
            if not text.startswith("ref:"):
                return text if SHA.fullmatch(text) else ""
            name = text.removeprefix("ref:").strip()
            if not REFERENCE.fullmatch(name) or ".." in name:
                return ""
            text = _read_text(self.own / name) or _read_text(self.common / name) or self._packed(name)
        return ""

    def diff(self, sha: str) -> bytes | None:
        """Return the patch from a commit to the working folder: of all tracked files. It is empty if nothing differs,
        None if git is missing, times out or fails."""
        with self._git_folder(sha, with_index=True) as place:
            if place is None:
                return None
            # Refresh the index: until then, files with other times than the index's count as changed. It exits with 1
            # where files differ.
            refresh = ("update-index", "-q", "--refresh", "--ignore-submodules")
            if _ask(place, self.folder, *refresh, allowed={0, 1}) is None:
                return None
            # Use a plumbing command: no alias, pager or porcelain setting affects it.
            words = ["--patch", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames"]
            words += ["--ignore-submodules=all", sha, "--"]
            return _ask(place, self.folder, "diff-index", *words)

    def find_commit(self, ref: str) -> str:
        """Return the commit that a branch, tag or commit names; empty if there is none."""
        found = self._read("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        return found if SHA.fullmatch(found) else ""

    def find_tree(self, commit: str) -> str:
        """Return the digest of all files of a commit; empty if it cannot be read."""
        return self._read("rev-parse", f"{commit}^{{tree}}")

    def list_references(self) -> list[str]:
        """Return the short names of branches and tags."""
        return self._read("for-each-ref", "--format=%(refname:short)").split()

    def find_missing(self, commit: str) -> str:
        """Return what :meth:`check_out` would leave out of a commit: submodules, or files that only a git-lfs filter
        would fetch. Empty if it leaves out nothing."""
        if "\x00160000 " in "\x00" + self._read("ls-tree", "-r", "-z", commit):
            return "submodules"
        if not self._read("grep", "-l", "filter=lfs", commit, "--", ".gitattributes"):
            return ""
        pointer = "^version https://git-lfs.github.com/spec/"
        return "files in git-lfs" if self._read("grep", "-l", "-I", pointer, commit) else ""

    def check_out(self, commit: str, folder: Path) -> bool:
        """Write the files of a commit into a new folder with its own git folder, and return whether git succeeded. Copy
        branches and tags and share objects; leave the repository unchanged."""
        place = folder / ".git"
        place.mkdir(parents=True)
        if not self._fill(place, commit):
            return False
        # Copy the references: with a link, as in other calls, a script in the folder could move ours.
        known = self._read("for-each-ref", "--format=%(objectname) %(refname)")
        (place / "packed-refs").write_text(f"{known}\n" if known else "", encoding="utf-8")
        words = ("checkout", "--quiet", "--detach", commit)
        return _ask(place, folder, *words, timeout_seconds=CHECKOUT_SECONDS) is not None

    def _read(self, *words: str) -> str:
        """Return git's output about commits and references, without the last newline; empty if git fails."""
        with self._git_folder(self.head(), with_references=True) as place:
            found = None if place is None else _ask(place, self.folder, *words)
        return (found or b"").decode(errors="replace").removesuffix("\n")

    @contextmanager
    def _git_folder(
        self, sha: str, *, with_index: bool = False, with_references: bool = False
    ) -> Iterator[Path | None]:
        """Yield a temporary git folder; None if the repository cannot be shared."""
        with tempfile.TemporaryDirectory(prefix="sparsebp-git-") as made:
            place = Path(made)
            is_whole = self._fill(place, sha)
            if with_index:
                index = _read_file(self.own / "index", LARGEST_INDEX_BYTES)
                is_whole &= index is not None
                (place / "index").write_bytes(index or b"")
                if is_whole:  # git compares the index's time with those of the files
                    shutil.copystat(self.own / "index", place / "index")
            if with_references:
                (place / "refs").rmdir()
                (place / "refs").symlink_to(self.common.resolve() / "refs")
                (place / "packed-refs").write_bytes(_read_file(self.common / "packed-refs", LARGEST_FILE_BYTES) or b"")
            yield place if is_whole else None

    def _fill(self, place: Path, sha: str) -> bool:
        """Turn a folder into a git folder at a commit, using the repository's objects. Return whether it can be."""
        objects = str(self.common.resolve() / "objects")
        # Alternates have one path a line, and git unescapes a path that begins with a quote.
        if not SHA.fullmatch(sha) or "\n" in objects or objects.startswith('"'):
            return False
        for part in ("refs", "objects/info"):
            (place / part).mkdir(parents=True)
        (place / "HEAD").write_text(f"{sha}\n", encoding="ascii")
        is_long = len(sha) == 64
        config = CONFIG.format(int(is_long)) + SHA256 * is_long
        (place / "config").write_text(config, encoding="ascii")
        (place / "objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
        return True

    def _packed(self, name: str) -> str:
        for line in _read_text(self.common / "packed-refs").splitlines():
            sha, _, found = line.partition(" ")
            if found == name:
                return sha
        return ""


def find_git() -> str | None:
    """Return git's path. Search only absolute entries of PATH: relative ones depend on the working folder."""
    return shutil.which("git", path=_absolute_path())


def _ask(
    place: Path, folder: Path, *words: str, allowed: frozenset[int] | set[int] = frozenset({0}),
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> bytes | None:  # fmt: skip
    """Return git's output in our own git folder; None if git is missing, takes too long or fails."""
    git = find_git()
    if git is None:
        return None
    command = [git, "--no-pager", "--literal-pathspecs", f"--git-dir={place}", f"--work-tree={folder}", *words]
    kept = {key: os.environ[key] for key in ("TMPDIR", "LD_LIBRARY_PATH") if key in os.environ}
    closed = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    closed |= {"GIT_ATTR_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "HOME": str(place)}
    closed |= {"GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C", "PATH": _absolute_path()}
    try:
        done = subprocess.run(
            command, cwd=folder, env=kept | closed, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=timeout_seconds, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in allowed else None


def _absolute_path() -> str:
    return os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part.startswith("/"))


def _read_file(path: Path, largest: int) -> bytes | None:
    try:
        return read_bounded(path, largest)
    except (OSError, ValueError):
        return None


def _read_text(path: Path) -> str:
    return (_read_file(path, LARGEST_FILE_BYTES) or b"").decode("utf-8", errors="replace").strip()
