"""Send a run's folder as a tar stream and receive it. Received content is checked before it becomes visible."""

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
from sparsebp_cli.run import RunFolder, durable, manifest
from sparsebp_cli.run.budget import (
    LARGEST_PLAN,
    LONGEST_LINE,
    BudgetError,
    open_regular,
    open_tar,
    read_members,
    size_of,
)
from sparsebp_cli.run.folder import is_shared
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.run.journal import scan
from sparsebp_cli.tracking.flush import send_again

CHUNK = 1 << 20
MOST_BYTES = 1 << 25  # read at once from an event log or output; the next poll reads more
END_OF_ARCHIVE = bytes(1024)
SENT = ("plan.json", JOURNAL, "checkpoints")  # all that a worker needs to start or to continue
FOLLOWED = (JOURNAL, "worker.log")  # files that grow line by line and are never replaced
FOLDERS = ("checkpoints", "model", "best")
MOST_PARTS = 32  # in a path: deleting a folder nested 1,000 levels deep crashes Python
# Errors of names that no run writes: too long, or a file where a folder belongs and the reverse.
ODD_NAMES = {errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}
CHECKPOINT = re.compile(r"step-[0-9]{8,}")
# Files about one machine's processes, locks and requests; never copied to another machine.
PRIVATE = {"target.json", "watcher.log", "tracking.json", "cancelled", "request", "labels.json"}


def pack(
    stream: IO[bytes], run: RunFolder, folder: str, owner: int = 0, group: int = 0, *, more: Sequence[str] = ()
) -> None:
    """Write a tar stream with the files that a worker needs for a run, and ``more``. ``owner`` and ``group`` are the
    numeric ids of all members. ``folder`` is the run's folder, relative to where the stream is unpacked. The stream
    contains every folder above it."""

    def adopt(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid, member.uname, member.gname = owner, group, "", ""
        return member

    # Use stream mode: the archive goes to the standard input of docker, ssh or kubectl.
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
    """Unpack a tar stream into a hidden part of the run's folder, and return that part for :func:`merge_into_run`.
    Raise ``UnreachableError`` if the stream breaks off. Raise ``RunFailedError`` for content that no run's folder has,
    such as a path that leads out of it or a sparse file."""
    part = run.path / f"{durable.PART}fetch"
    # An interrupted fetch may have left one.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    counted = _TailStream(stream)
    try:
        with open_tar(counted) as archive:
            for member in read_members(archive):
                if member.isfile() or member.isdir():  # a run writes no links, and a link could lead out of the folder
                    _check_member(member)
                    archive.extract(member, part, filter="data")
        # Read to the end: otherwise the sender meets a closed pipe, and a truncated archive goes unnoticed.
        while counted.read(CHUNK):
            pass
    except (tarfile.FilterError, BudgetError, RecursionError) as error:
        raise _refuse(str(error)) from None
    except OSError as error:
        if error.errno not in ODD_NAMES:
            raise
        raise _refuse(f"{error.strerror}: {shorten(str(error.filename))}") from None
    except (ValueError, OverflowError) as error:  # from names and times that no file can have
        raise _refuse(str(error)) from None
    except (tarfile.TarError, EOFError) as error:
        raise UnreachableError(f"the transfer of the results broke off: {error}") from None
    if counted.tail != END_OF_ARCHIVE:
        raise UnreachableError("the transfer of the results broke off before its end")
    return part


def merge_into_run(part: Path, top: str, run: RunFolder) -> None:
    """Make received files visible: new files appear atomically, and the event log grows. ``top`` is the run's folder in
    ``part``. Raise ``RunFailedError``, and merge nothing, if files and folders are mixed up or a model does not match
    its manifest. The caller must then keep the remote copy."""
    if not (part / top).is_dir():
        raise _refuse(f"it has no folder {top}")
    for path in (part / top).iterdir():
        place = run.path / path.name
        known = path.name in (*FOLLOWED, *FOLDERS)
        is_folder = path.name in FOLDERS if known else place.is_dir()
        if (known or place.exists()) and path.is_dir() != is_folder:
            raise _refuse(f"{shorten(path.name)} must be a {'folder' if is_folder else 'file'}")
    for model in (part / top / "model", part / top / "best"):
        # Images with an earlier version write no manifest: then only the transfer itself is checked.
        if (model / manifest.MANIFEST).exists() and (damage := manifest.find_damage(model)):
            raise RunFailedError(f"the run's model is damaged and was not fetched: {damage}")
    _merge(part / top, run)
    shutil.rmtree(part, ignore_errors=True)


def append_lines(file: Path, data: bytes) -> int:
    """Append the complete lines of new data to a file, and return their bytes. Omit an incomplete last line."""
    whole = data[: data.rfind(b"\n") + 1]
    if whole:
        durable.append(file, whole)
    return len(whole)


def _refuse(what: str) -> RunFailedError:
    return RunFailedError(f"the run's results look dangerous and were not fetched: {what}")


def _check_member(member: tarfile.TarInfo) -> None:
    if member.issparse():  # a few bytes can unpack to a file of any size
        raise _refuse(f"{shorten(member.name)!r} is a sparse file (a file with holes), which is not allowed")
    if PurePosixPath(member.name).name == "plan.json" and member.size > LARGEST_PLAN:
        raise _refuse(f"plan.json may have at most {LARGEST_PLAN} bytes, got {member.size}")
    if len(PurePosixPath(member.name).parts) > MOST_PARTS:
        raise _refuse(f"the path {shorten(member.name)!r} has more than {MOST_PARTS} folders")


def _walk(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        path = folder / name
        if path.is_dir():
            yield path
            yield from sorted(child for child in path.rglob("*") if not child.is_symlink())
        elif path.exists():
            yield path


def _merge(folder: Path, run: RunFolder) -> None:
    for path in sorted(folder.iterdir()):
        place = run.path / path.name
        if path.name in PRIVATE or path.name.endswith(".lock") or path.name.startswith(durable.PART):
            continue
        if path.name in FOLLOWED:
            if path.name == JOURNAL:
                _append_journal(place, path)
        elif path.name == "checkpoints":
            _merge_checkpoints(path, place)
        elif path.is_dir():
            durable.put_folder(path, place)
        elif path.name != "plan.json":
            # Not plan.json: the plan that was sent is authoritative.
            durable.move(path, place)


def _merge_checkpoints(folder: Path, place: Path) -> None:
    """Move new checkpoints here. Remove those deleted remotely if the newest remaining one is intact."""
    durable.make_folder(place, exist_ok=True)
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in sorted(there):
        if not (place / name).exists():
            durable.move(folder / name, place / name)
        elif manifest.find_damage(place / name) and not manifest.find_damage(folder / name):
            durable.put_folder(folder / name, place / name)  # intact checkpoints never change
    # Step numbers above eight digits are longer, and so newer.
    newest = max(filter(CHECKPOINT.fullmatch, there), key=lambda name: (len(name), name), default=None)
    if newest is not None and not manifest.find_damage(place / newest):
        for path in place.iterdir():
            if path.name not in there and CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _append_journal(mine: Path, theirs: Path) -> None:
    """Append the part of a complete remote event log that the local one lacks. The remote log starts as a copy of the
    local one, so differences mean that pieces were damaged on their way. If the remote log has fewer unreadable lines
    and no fewer records, it replaces the local one. Otherwise keep it beside the local one, because the remote copy is
    deleted next."""
    known = size_of(mine)
    with open_regular(theirs) as stream:
        if _begins_with(stream, mine):
            stream.seek(known)
            _append_whole_lines(mine, stream)
            return
    (here, here_unreadable), (there, there_unreadable) = _count_lines(mine.parent), _count_lines(theirs.parent)
    if there_unreadable < here_unreadable and there >= here:
        durable.move(theirs, mine)
        # Send everything to the tracking store again; it stores each point once. See decision 9.
        send_again(mine.parent)
    else:
        durable.move(theirs, mine.with_name(f"there-{JOURNAL}"))


def _append_whole_lines(file: Path, stream: IO[bytes]) -> None:
    rest = b""
    while chunk := stream.read(CHUNK):
        rest += chunk
        rest = rest[append_lines(file, rest) :]
        if len(rest) > LONGEST_LINE:
            raise _refuse(f"a line of the run's event log has more than {LONGEST_LINE} bytes")


def _begins_with(stream: IO[bytes], file: Path) -> bool:
    if not file.exists():
        return True
    with open_regular(file) as known:
        while chunk := known.read(CHUNK):
            if stream.read(len(chunk)) != chunk:
                return False
    return True


def _count_lines(folder: Path) -> tuple[int, int]:
    """Return the numbers of lines with and without a valid record in an event log."""
    found = [record is None for record, _ in scan(folder)]
    return found.count(False), found.count(True)


class _TailStream:
    """A stream that keeps its last bytes, because tarfile does not notice an archive truncated between two members."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.tail = stream, b""

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        self.tail = (self.tail + data)[-len(END_OF_ARCHIVE) :]
        return data
