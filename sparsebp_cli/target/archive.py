"""A run's folder as a tar stream, there and back. What comes back is checked before any of it becomes visible."""

from __future__ import annotations

import errno
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from sparsebp_cli.errors import RunFailedError, UnreachableError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.folder import is_shared
from sparsebp_cli.run.journal import FILE as JOURNAL

CHUNK = 1 << 20
END_OF_ARCHIVE = bytes(1024)
SENT = ("plan.json", JOURNAL, "checkpoints")  # all that a worker needs to start or to go on
FOLLOWED = (JOURNAL, "worker.log")  # grow here line by line; never replaced as a whole
FOLDERS = ("checkpoints", "model")
MOST_PARTS = 32  # of a path: removing a folder that is nested 1,000 times ends Python
# What the system says of names that no run writes: too long ones, and files and folders in each other's place.
ODD_NAMES = {errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}
CHECKPOINT = re.compile(r"step-[0-9]{8,}")
# Made here or there for the one side only: processes, locks, requests.
PRIVATE = {"target.json", "watcher.log", "tracking.json", "cancelled", "request"}


def pack(
    stream: IO[bytes], run: RunFolder, folder: str, owner: int = 0, group: int = 0, *, more: Sequence[str] = ()
) -> None:
    """Write a tar stream with what a worker needs of a run.

    Args:
        stream: Takes the bytes.
        run: The run.
        folder: Where it belongs, relative to where the stream is unpacked; every folder on the way is in the stream.
        owner: Number of the user that everything belongs to.
        group: Number of the group.
        more: Files that go along beside what a worker needs.
    """

    def adopt(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid, member.uname, member.gname = owner, group, "", ""
        return member

    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for part in [*reversed(PurePosixPath(folder).parents), PurePosixPath(folder)]:
            if part.name:
                member = tarfile.TarInfo(str(part))
                is_run = part == PurePosixPath(folder)
                member.type, member.mode = tarfile.DIRTYPE, 0o755 if is_shared() or not is_run else 0o700
                archive.addfile(adopt(member))
        for path in _walk(run.path, (*SENT, *more)):
            archive.add(path, f"{folder}/{path.relative_to(run.path)}", recursive=False, filter=adopt)


def receive(stream: IO[bytes], run: RunFolder) -> Path:
    """Take a tar stream apart beside the run's content, where nobody sees it yet.

    Args:
        stream: Of tar.
        run: The run.

    Returns:
        A folder with what was in it, for :func:`take_in`.

    Raises:
        UnreachableError: The stream broke off.
        RunFailedError: It holds what no run's folder holds: a path that leads out of it, a file with holes.
    """
    part = run.path / ".part-fetch"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    counted = _Tail(stream)
    try:
        with tarfile.open(fileobj=counted, mode="r|", errorlevel=2) as archive:  # type: ignore[call-overload]
            for member in archive:
                if member.isfile() or member.isdir():  # links are of no use, and of no good
                    _check_member(member)
                    archive.extract(member, part, filter="data")
        while counted.read(CHUNK):
            pass
    except tarfile.FilterError as error:
        raise _refuse(str(error)) from None
    except OSError as error:
        if error.errno not in ODD_NAMES:
            raise
        raise _refuse(f"{error.strerror}: {shorten(str(error.filename))}") from None
    except (ValueError, OverflowError) as error:  # of names and times that no file can have
        raise _refuse(str(error)) from None
    except (tarfile.TarError, EOFError) as error:
        raise UnreachableError(f"a transfer broke off: {error}") from None
    if counted.tail != END_OF_ARCHIVE:
        raise UnreachableError("a transfer broke off before the end of the archive")
    return part


def take_in(part: Path, top: str, run: RunFolder) -> None:
    """Make visible what was received: new files appear whole, the journal grows.

    Args:
        part: From :func:`receive`.
        top: Name of the run's folder in it.
        run: The run.

    Raises:
        RunFailedError: It holds files where a run has folders, or the other way about. Nothing was taken.
    """
    if not (part / top).is_dir():
        raise _refuse(f"there is no folder {top}")
    for path in (part / top).iterdir():
        place = run.path / path.name
        known = path.name in (*FOLLOWED, *FOLDERS)
        is_folder = path.name in FOLDERS if known else place.is_dir()
        if (known or place.exists()) and path.is_dir() != is_folder:
            raise _refuse(f"{shorten(path.name)} must be a {'folder' if is_folder else 'file'}")
    _settle(part / top, run)
    shutil.rmtree(part, ignore_errors=True)


def append_lines(file: Path, data: bytes) -> int:
    """Append whole lines to a file; what comes after the last line end waits for the rest.

    Args:
        file: Made where it does not exist.
        data: What is new.

    Returns:
        Bytes appended.
    """
    whole = data[: data.rfind(b"\n") + 1]
    if whole:
        with file.open("ab") as stream:
            stream.write(whole)
    return len(whole)


def size_of(file: Path) -> int:
    """Return a file's bytes; 0 where there is none."""
    return file.stat().st_size if file.exists() else 0


def _refuse(what: str) -> RunFailedError:
    return RunFailedError(f"what the run left holds something dangerous and was not taken: {what}")


def _check_member(member: tarfile.TarInfo) -> None:
    if member.issparse():  # a few bytes that become a file of any size
        raise _refuse(f"{shorten(member.name)!r} is a file with holes")
    if len(PurePosixPath(member.name).parts) > MOST_PARTS:
        raise _refuse(f"{shorten(member.name)!r} has more than {MOST_PARTS} parts")


def _walk(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        path = folder / name
        if path.is_dir():
            yield path
            yield from sorted(child for child in path.rglob("*") if not child.is_symlink())
        elif path.exists():
            yield path


def _settle(folder: Path, run: RunFolder) -> None:
    for path in sorted(folder.iterdir()):
        place = run.path / path.name
        if path.name in PRIVATE or path.name.endswith(".lock") or path.name.startswith(".part"):
            continue
        if path.name in FOLLOWED:
            if path.name == JOURNAL:
                _extend(place, path)
        elif path.name == "checkpoints":
            _settle_checkpoints(path, place)
        elif path.is_dir():
            old = run.path / f".part-old-{path.name}"
            shutil.rmtree(old, ignore_errors=True)
            if place.exists():
                place.rename(old)
            path.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        elif path.name != "plan.json":
            path.replace(place)


def _settle_checkpoints(folder: Path, place: Path) -> None:
    """Take over the checkpoints there, and let go of those that were rotated away there."""
    place.mkdir(exist_ok=True)
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in sorted(there):
        if not (place / name).exists():  # a checkpoint never changes
            (folder / name).rename(place / name)
    if there:
        for path in place.iterdir():
            if path.name not in there and CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _extend(mine: Path, theirs: Path) -> None:
    """Append what a whole journal holds beyond mine; one that does not begin like mine is another one's."""
    known = size_of(mine)
    with theirs.open("rb") as stream:
        if known and (not mine.exists() or stream.read(known) != mine.read_bytes()):
            return
        stream.seek(known)
        append_lines(mine, stream.read())


class _Tail:
    """A stream that remembers its last bytes: an archive that ends early looks like one that ends."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.tail = stream, b""

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        self.tail = (self.tail + data)[-len(END_OF_ARCHIVE) :]
        return data
