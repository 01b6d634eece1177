"""What keeps a container away from its host: one rule for folders and users, the same on every engine.

A recipe may come from anybody, so the folders that it can mount are an allow-list: ``PLACES``, and those that the
person who submits adds with ``SPARSEBP_MOUNTS``. Paths are judged as written and as they resolve on this machine;
where an engine is elsewhere and can be asked over SSH, as they resolve there too.
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
# Where machines keep data. /home and the temporary folders hold more than one person's: only what is inside is mounted.
PLACES = (
    "/data", "/datasets", "/home", "/lustre", "/media", "/mnt", "/opt", "/project", "/projects", "/scratch", "/shared",
    "/srv", "/tmp", "/var/tmp", "/work", "/workspace",
)  # fmt: skip
CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run", "/var/lib")  # neither these nor anything inside
NEVER = ("/root", "/home", "/tmp", "/var/tmp", "/usr", *CLOSED)  # neither these nor what contains one of them
TOKENS = (".cache/huggingface/token", ".cache/huggingface/stored_tokens")  # the hub's, in a home
PART = re.compile(r"[\w.@+=~% -]+")
NOBODY = "10001:10001"  # what the image is made for
FIRST_ORDINARY_ID = 1000  # users and groups of the system have smaller numbers


class Mount(NamedTuple):
    """A folder of the host that a container sees.

    Args:
        source: On the host.
        target: In the container.
        writable: Whether the container may write there.
    """

    source: str
    target: str
    writable: bool

    @property
    def text(self) -> str:
        """``SOURCE:TARGET:ro`` or ``:rw``, as pyxis and apptainer read it; without a mode both would write."""
        return f"{self.source}:{self.target}:{'rw' if self.writable else 'ro'}"


def read_mount(text: str) -> Mount:
    """Read a mount of a recipe and refuse one that leads out of the container.

    Args:
        text: ``SOURCE:TARGET``, or with ``:ro`` or ``:rw``.

    Returns:
        The mount, read-only unless it says ``rw``.

    Raises:
        ValueError: It is none, or its source is not allowed as written or as it resolves on this machine.
    """
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
    """Refuse a path that engines or shells could read otherwise than we do.

    Args:
        path: As a recipe has it.

    Raises:
        ValueError: It is not absolute, not in its shortest form, or has a character that is special somewhere.
    """
    parts = path.split("/")
    if parts[0] or not path.strip("/") or any(part in {".", ".."} or not PART.fullmatch(part) for part in parts[1:]):
        raise ValueError(
            "must be an absolute path in its shortest form, of letters, digits, spaces and . _ - @ + = ~ %, "
            f"got {path!r}"
        )


def check_source(written: str, real: str, sockets: Iterable[str] = ()) -> None:
    """Refuse a folder of the host that would give the container more than data.

    Args:
        written: The path as the recipe has it, for the error line.
        real: The same or what it resolves to.
        sockets: Paths of sockets on the host, where they are known.

    Raises:
        ValueError: It is outside the allow-list, or holds a socket, a home, keys or a part of the system.
    """
    path = PurePosixPath(real)
    named = written if real == written else f"{written} ({real})"
    if any(path.is_relative_to(folder) for folder in CLOSED):
        raise ValueError(f"{named} is not mounted: it belongs to the system")
    if any(PurePosixPath(kept).is_relative_to(path) for kept in [*NEVER, *map(str, _homes(path))]):
        raise ValueError(f"{named} is not mounted: it holds a home or a part of the system; name a folder inside")
    if any(_is_private(path, home) for home in _homes(path)):
        raise ValueError(f"{named} is not mounted: it holds settings or keys of a user")
    for socket in sockets:
        if PurePosixPath(socket).is_relative_to(path):
            raise ValueError(f"{named} is not mounted: the socket {socket} in it reaches a program of the host")
    if path.suffix in {".sock", ".socket"} or _is_special(path):
        raise ValueError(f"{named} is not mounted: it is a socket or a device")
    allowed = (*PLACES, *filter(None, os.environ.get(VARIABLE, "").split(":")))
    if not any(path.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{named} is not mounted: it is in none of {', '.join(allowed)}; "
            f"{VARIABLE}={path} in the environment of the client allows it"
        )


def check_user(text: str) -> None:
    """Refuse a user of a container who has rights on the host.

    Args:
        text: ``UID:GID``.

    Raises:
        ValueError: It is neither the submitting user nor a pair of one number that nobody has here.
    """
    if text == NOBODY:
        return
    user, group = (int(number) for number in text.split(":"))
    own = (user, group) == (os.getuid(), os.getgid())
    if own and user != 0 and (group >= FIRST_ORDINARY_ID or _group_name(group) == "users"):
        return
    what = f"{text} is not used: "
    if user != group or user < FIRST_ORDINARY_ID:
        raise ValueError(
            f"{what}give your own numbers, or one number from {FIRST_ORDINARY_ID} on for both, such as {NOBODY}"
        )
    if name := _user_name(user) or _group_name(group):
        raise ValueError(f"{what}it is {name} on this machine")


def question(mounts: Sequence[str]) -> str:
    """Return shell lines whose output :func:`check_there` judges: how paths resolve on a host, and its sockets."""
    paths = " ".join(shlex.quote(read_mount(mount).source) for mount in mounts)
    return f"realpath -m -- {paths} && printf '==\\n' && cat /proc/net/unix"


def check_there(mounts: Sequence[str], output: str) -> None:
    """Refuse mounts by how their sources resolve on the host of the engine.

    Args:
        mounts: Of the recipe.
        output: Of :func:`question` there; one that is no answer to it (a host without a shell) is not judged.

    Raises:
        ValueError: One leads out of the container.
    """
    resolved, found, table = output.partition("\n==")
    if not found or len(resolved.splitlines()) != len(mounts):
        return
    for mount, real in zip(mounts, resolved.splitlines(), strict=True):
        check_source(read_mount(mount).source, real, read_sockets(table))


def listening_sockets() -> list[str]:
    """Return the paths of the sockets that programs of this machine have bound; none where that cannot be read."""
    try:
        return read_sockets(Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return []


def read_sockets(table: str) -> list[str]:
    """Return the paths of a table like ``/proc/net/unix``; names that are no paths are left out."""
    rows = (line.split(None, 7) for line in table.splitlines()[1:])
    return sorted({os.path.normpath(row[7]) for row in rows if len(row) == 8 and row[7].startswith("/")})


def _homes(path: PurePosixPath) -> list[PurePosixPath]:
    """Return the homes that a path could lie in, or hold."""
    own = {Path.home(), Path(os.path.realpath(Path.home()))}
    found = [PurePosixPath(home) for home in own if home != Path("/")]
    if path.is_relative_to("/home") and len(path.parts) > 2:
        found.append(PurePosixPath(*path.parts[:3]))
    return found


def _is_private(path: PurePosixPath, home: PurePosixPath) -> bool:
    """Whether a path in a home is one of its settings (they begin with a dot), or holds a token of the hub."""
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
