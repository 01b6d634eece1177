"""Code version and uncommitted changes on the machine that made a plan, so that a number can be traced to its code."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

MAX_DIFF_CHARACTERS = 200_000
UNKNOWN = "unknown"


class Provenance(BaseModel):
    """The origin of a plan. It never holds remotes, environment variables or command lines, which may hold secrets."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

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
    # Copied: reading an attribute of a lazy module may import others.
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
    one. In doubt the text counts as one."""
    return next((name for name, form in _FORMS if form.search(text)), "")


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
        # A git folder of our own: the repository's config may name programs, which git would run.
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
            # One path a line, and one that begins with a quote is read as an escaped one.
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
            # Times that are not the index's count as changes, until it is refreshed.
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
