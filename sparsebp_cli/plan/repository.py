"""Reading of a git repository that may be hostile: an unpacked folder can configure git to run any command.

The commit is read from the files of ``.git``. The difference comes from git itself, in a repository folder of our own
with an empty configuration, a copy of the index, and the objects by reference. So git reads no configuration of the
folder or of the user, which excludes every way to run a command: ``core.fsmonitor``, ``diff.external``, text
conversions and filters (attributes only name them; the configuration holds the commands), hooks, pagers, aliases,
included files, partial clones and submodules.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TIMEOUT_SECONDS = 10.0
LARGEST_FILE_BYTES = 64 * 1024 * 1024  # of references, packed ones included
LARGEST_INDEX_BYTES = 256 * 1024 * 1024
SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REFERENCE = re.compile(r"refs/[^\x00-\x20~^:?*\[\\\x7f]+")


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
            place = top / ".git"
            if place.is_dir():
                return cls(top, place, place)
            if text := _read_text(place):  # of a worktree or submodule
                own = top / text.removeprefix("gitdir:").strip()
                common = _read_text(own / "commondir")
                return cls(top, own, own / common if common else own) if own.is_dir() else None
        return None

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

    def diff(self, sha: str, name: str | None = None) -> bytes | None:
        """Return the patch of all tracked files, or of one named relative to the folder, against a commit; empty if
        nothing differs, None if git is missing, times out or fails."""
        index = self.own / "index"
        if not _is_file(index, LARGEST_INDEX_BYTES):
            return None
        with tempfile.TemporaryDirectory(prefix="sparsebp-git-") as made:
            place = Path(made)
            for part in ("refs", "objects/info"):
                (place / part).mkdir(parents=True)
            shutil.copy2(index, place / "index")  # keeps its time, which git compares with those of the files
            (place / "HEAD").write_text(f"{sha}\n", encoding="ascii")
            config = "[core]\n\trepositoryformatversion = 1\n\tbare = false\n"
            config += "[extensions]\n\tobjectFormat = sha256\n" if len(sha) == 64 else ""
            (place / "config").write_text(config, encoding="ascii")
            objects = str(self.common.resolve() / "objects")
            if "\n" in objects or objects.startswith('"'):
                return None
            (place / "objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
            return self._ask_git(place, sha, name)

    def _ask_git(self, place: Path, sha: str, name: str | None) -> bytes | None:
        git = shutil.which("git", path=_absolute_path())
        if git is None:
            return None
        words = [git, "--no-pager", "--literal-pathspecs", f"--git-dir={place}", f"--work-tree={self.folder}"]
        words += ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.attributesFile=/dev/null"]
        words += ["-c", "core.bigFileThreshold=16m"]  # git compares larger files by digest only
        # A plumbing command: no alias, pager or porcelain setting affects it.
        words += [
            "diff-index",
            "--patch",
            "--full-index",
            "--no-ext-diff",
            "--no-textconv",
            "--no-color",
            "--no-renames",
        ]
        words += ["--ignore-submodules=all", sha, "--", *([name] if name else [])]
        kept = {key: os.environ[key] for key in ("TMPDIR", "LD_LIBRARY_PATH") if key in os.environ}
        closed = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        closed |= {"GIT_ATTR_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "HOME": str(place)}
        closed |= {"GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C", "PATH": _absolute_path()}
        try:
            refreshed = subprocess.run(
                [*words[: words.index("diff-index")], "update-index", "-q", "--refresh", "--ignore-submodules"],
                cwd=self.folder, env=kept | closed, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
            done = subprocess.run(
                words, cwd=self.folder, env=kept | closed, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 and refreshed.returncode in {0, 1} else None

    def _packed(self, name: str) -> str:
        for line in _read_text(self.common / "packed-refs").splitlines():
            sha, _, found = line.partition(" ")
            if found == name:
                return sha
        return ""


def _absolute_path() -> str:
    """Return PATH without relative entries, which depend on the working folder."""
    return os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part.startswith("/"))


def _is_file(path: Path, largest_bytes: int) -> bool:
    """Return whether a path is a regular file of limited size. A pipe would block; a link could lead to a device."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= largest_bytes


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() if _is_file(path, LARGEST_FILE_BYTES) else ""
    except OSError:
        return ""
