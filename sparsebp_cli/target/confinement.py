"""Restrict which host folders a container may mount and as which user it runs, on every engine.

Recipes may come from anybody, so mounts need an allow-list: ``PLACES``, and the folders that the submitting user adds
with ``SPARSEBP_MOUNTS``. Paths are checked as written and as they resolve on this machine. If a remote engine's host
can be reached over SSH, they are checked as they resolve there too.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

VARIABLE = "SPARSEBP_MOUNTS"
# Usual places of data. /home and the temporary folders belong to several users, so only folders inside are mounted.
PLACES = (
    "/data", "/datasets", "/home", "/lustre", "/media", "/mnt", "/opt", "/project", "/projects", "/scratch", "/shared",
    "/srv", "/tmp", "/var/tmp", "/work", "/workspace",
)  # fmt: skip
CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run", "/var/lib")  # neither these nor anything inside
NEVER = ("/root", "/home", "/tmp", "/var/tmp", "/usr", *CLOSED)  # neither these folders nor any that contains one
TOKENS = (".cache/huggingface/token", ".cache/huggingface/stored_tokens")  # tokens of the hub, in a home folder
PART = re.compile(r"[\w.@+=~% -]+")
NOBODY = "10001:10001"  # the user for which the image is built
FIRST_ORDINARY_ID = 1000  # ids of system users and groups are smaller


class Mount(NamedTuple):
    """A host folder (``source``) that a container sees as ``target``."""

    source: str
    target: str
    writable: bool

    @property
    def text(self) -> str:
        """``SOURCE:TARGET:ro`` or ``:rw``, for pyxis and apptainer; without a mode both mount it writable."""
        return f"{self.source}:{self.target}:{'rw' if self.writable else 'ro'}"


def read_mount(text: str) -> Mount:
    """Parse ``SOURCE:TARGET[:ro|rw]``; the default is read-only. Raise ``ValueError`` if it is malformed, or if its
    source is not allowed as written or as it resolves here."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in {"", "ro", "rw"} or (not mode and text.count(":") != 1):
        raise ValueError(f"must be SOURCE:TARGET or SOURCE:TARGET:rw with absolute paths, got {text!r}")
    for path in (source, target):
        check_spelling(path)
    check_source(source, source)
    check_source(source, os.path.realpath(source), listening_sockets())
    return Mount(source, target, mode == "rw")


def check_spelling(path: str) -> None:
    """Raise ``ValueError`` unless a path is absolute, in its shortest form, and without special characters."""
    parts = path.split("/")
    if parts[0] or not path.strip("/") or any(part in {".", ".."} or not PART.fullmatch(part) for part in parts[1:]):
        raise ValueError(
            "must be an absolute path of letters, digits, spaces and . _ - @ + = ~ %, without . and .. as parts, "
            f"without // and without / at the end, got {path!r}"
        )


def check_source(written: str, real: str, sockets: Iterable[str] = ()) -> None:
    """Refuse a host folder that would give the container more than data. ``written`` is the path in the recipe, for the
    error; ``real`` is that path or its resolution; ``sockets`` are the host's known sockets. Raise ``ValueError`` if
    the folder is outside the allow-list, or holds a socket, a home, keys or a part of the system."""
    path = PurePosixPath(real)
    named = written if real == written else f"{written} ({real})"
    if any(path.is_relative_to(folder) for folder in CLOSED):
        raise ValueError(f"{named} cannot be mounted: it is a system folder")
    if any(PurePosixPath(kept).is_relative_to(path) for kept in [*NEVER, *map(str, _homes(path))]):
        raise ValueError(f"{named} cannot be mounted: it contains a home folder or system files; name a folder in it")
    if any(_is_private(path, home) for home in _homes(path)):
        raise ValueError(f"{named} cannot be mounted: it contains settings or keys of a user; name another folder")
    for socket in sockets:
        if PurePosixPath(socket).is_relative_to(path):
            what = f"a container could control a program of the host through the socket {socket}"
            raise ValueError(f"{named} cannot be mounted: {what}")
    if path.suffix in {".sock", ".socket"} or _is_special(path):
        raise ValueError(f"{named} cannot be mounted: it is a socket or a device")
    allowed = (*PLACES, *filter(None, os.environ.get(VARIABLE, "").split(":")))
    if not any(path.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{named} cannot be mounted: it must be inside one of {', '.join(allowed)}; set {VARIABLE}={path} on this "
            "machine to allow it"
        )


def check_user(text: str) -> None:
    """Raise ``ValueError`` unless ``UID:GID`` is the submitting user, or both are one number unused here."""
    if text == NOBODY:
        return
    user, group = (int(number) for number in text.split(":"))
    own = (user, group) == (os.getuid(), os.getgid())
    if own and user != 0 and (group >= FIRST_ORDINARY_ID or _group_name(group) == "users"):
        return
    what = f"{text} is refused: "
    if user != group or user < FIRST_ORDINARY_ID:
        raise ValueError(
            f"{what}give your own user and group ids, or one id of at least {FIRST_ORDINARY_ID} for both, such as "
            f"{NOBODY}"
        )
    if name := _user_name(user) or _group_name(group):
        raise ValueError(f"{what}this user or group id belongs to {name} here; choose an unused id, such as {NOBODY}")


def mount_query(mounts: Sequence[str]) -> str:
    """Return shell lines that print the resolved sources of the mounts on a host, and its sockets."""
    paths = " ".join(shlex.quote(read_mount(mount).source) for mount in mounts)
    # -m, because a source may not exist there yet.
    return f"realpath -m -- {paths} && printf '==\\n' && cat /proc/net/unix"


def check_remote_mounts(mounts: Sequence[str], output: str) -> None:
    """Raise ``ValueError`` if the output of :func:`mount_query` shows that a mount's source is not allowed there.
    Output in another form, for example from a host without a shell, is not checked."""
    resolved, found, table = output.partition("\n==")
    if not found or len(resolved.splitlines()) != len(mounts):
        return
    for mount, real in zip(mounts, resolved.splitlines(), strict=True):
        check_source(read_mount(mount).source, real, read_sockets(table))


def listening_sockets() -> list[str]:
    """Return the paths of sockets that programs on this machine have bound; empty if the table cannot be read."""
    try:
        return read_sockets(Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return []


def read_sockets(table: str) -> list[str]:
    """Return the paths in a table like ``/proc/net/unix``, without abstract names."""
    rows = (line.split(None, 7) for line in table.splitlines()[1:])
    return sorted({os.path.normpath(row[7]) for row in rows if len(row) == 8 and row[7].startswith("/")})


def _homes(path: PurePosixPath) -> list[PurePosixPath]:
    """Return the home folders that a path may lie in or contain."""
    own = {Path.home(), Path(os.path.realpath(Path.home()))}
    found = [PurePosixPath(home) for home in own if home != Path("/")]
    if path.is_relative_to("/home") and len(path.parts) > 2:
        found.append(PurePosixPath(*path.parts[:3]))
    return found


def _is_private(path: PurePosixPath, home: PurePosixPath) -> bool:
    """Return whether a path in a home is one of its hidden folders, or contains a token of the hub."""
    if not path.is_relative_to(home):
        return False
    first = path.relative_to(home).parts[0]
    holds_token = any((home / token).is_relative_to(path) and Path(home / token).exists() for token in TOKENS)
    return (first.startswith(".") and first != ".cache") or holds_token


def _is_special(path: PurePosixPath) -> bool:
    there = Path(path)
    try:
        return there.exists() and not (there.is_dir() or there.is_file())
    except OSError:
        # If the path cannot be checked, do not mount it.
        return True


def _user_name(number: int) -> str:
    try:
        return "" if number == os.getuid() else f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return ""


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return ""
