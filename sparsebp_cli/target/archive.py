"""Sends a run's folder as a tar stream and receives it; received content is checked before it becomes visible."""

from __future__ import annotations

import errno
import re
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from sparsebp_cli import durable
from sparsebp_cli.errors import RunFailedError, UnreachableError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.run import RunFolder, manifest
from sparsebp_cli.run.budget import LARGEST_PLAN, LONGEST_LINE, BudgetError, open_regular, open_tar, read_members
from sparsebp_cli.run.folder import CACHE, is_shared
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.run.journal import scan
from sparsebp_cli.tracking.flush import send_again

CHUNK = 1 << 20
MOST_BYTES = 1 << 25  # of a journal or an output that are taken at once; the next poll takes more
END_OF_ARCHIVE = bytes(1024)
SENT = ("plan.json", JOURNAL, "checkpoints")  # all that a worker needs to start or to go on
FOLLOWED = (JOURNAL, "worker.log")  # appended to line by line; never replaced as a whole
FOLDERS = ("checkpoints", "model", "best")
MOST_PARTS = 32  # of a path: removing a folder that is nested 1,000 times ends Python
# Errors of names that no run writes: too long ones, and files and folders in each other's place.
ODD_NAMES = {errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}
CHECKPOINT = re.compile(r"step-[0-9]{8,}")
# Files about the processes, locks and requests of one machine; never copied to the other.
PRIVATE = {"target.json", "watcher.log", "tracking.json", "cancelled", "request", "labels.json", CACHE}


def pack(
    stream: IO[bytes], run: RunFolder, folder: str, owner: int = 0, group: int = 0, *, more: Sequence[str] = ()
) -> None:
    """Write a tar stream with the files that a worker needs of a run, and ``more``. Everything is owned by ``owner``
    and ``group``, numeric ids. ``folder`` is the run's folder relative to where the stream is unpacked; the stream
    contains every folder above it."""

    def adopt(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid, member.uname, member.gname = owner, group, "", ""
        return member

    # A stream: it is written into the standard input of docker, ssh or kubectl.
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
    Raises ``UnreachableError`` when the stream broke off, and ``RunFailedError`` for content that no run's folder has:
    a path that leads out of it, a sparse file."""
    part = run.path / f"{durable.PART}fetch"
    # A fetch that broke off may have left one.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    counted = _TailStream(stream)
    try:
        with open_tar(counted) as archive:
            for member in read_members(archive):
                if member.isfile() or member.isdir():  # a run writes no links, and one could lead out of the folder
                    _check_member(member)
                    archive.extract(member, part, filter="data")
        # To the end of the transfer: the sender would meet a closed pipe, and a cut archive would not show.
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
        raise UnreachableError(f"a transfer broke off: {error}") from None
    if counted.tail != END_OF_ARCHIVE:
        raise UnreachableError("a transfer broke off before the end of the archive")
    return part


def merge_into_run(part: Path, top: str, run: RunFolder) -> None:
    """Make received files visible: new files appear whole, the journal grows. ``top`` is the run's folder in ``part``.
    Raises ``RunFailedError``, and merges nothing, if it has a file where a run has a folder, or the other way round,
    and for a model that does not match its manifest: the copy there must not be deleted then."""
    if not (part / top).is_dir():
        raise _refuse(f"there is no folder {top}")
    for path in (part / top).iterdir():
        place = run.path / path.name
        known = path.name in (*FOLLOWED, *FOLDERS)
        is_folder = path.name in FOLDERS if known else place.is_dir()
        if (known or place.exists()) and path.is_dir() != is_folder:
            raise _refuse(f"{shorten(path.name)} must be a {'folder' if is_folder else 'file'}")
    for model in (part / top / "model", part / top / "best"):
        # Images with an earlier version write no manifest; what came is then only as whole as the transfer.
        if (model / manifest.MANIFEST).exists() and (damage := manifest.find_damage(model)):
            raise RunFailedError(f"the model that the run left is damaged and was not taken: {damage}")
    _merge(part / top, run)
    shutil.rmtree(part, ignore_errors=True)


def append_lines(file: Path, data: bytes) -> int:
    """Append the whole lines of new data to a file, and return their bytes; an unfinished last line is left out."""
    whole = data[: data.rfind(b"\n") + 1]
    if whole:
        durable.append(file, whole)
    return len(whole)


def size_of(file: Path) -> int:
    """Return a file's bytes; 0 where there is none."""
    return file.stat().st_size if file.exists() else 0


def _refuse(what: str) -> RunFailedError:
    return RunFailedError(f"what the run left holds something dangerous and was not taken: {what}")


def _check_member(member: tarfile.TarInfo) -> None:
    if member.issparse():  # a few bytes can unpack to a file of any size
        raise _refuse(f"{shorten(member.name)!r} is a file with holes")
    if PurePosixPath(member.name).name == "plan.json" and member.size > LARGEST_PLAN:
        raise _refuse(f"plan.json may have {LARGEST_PLAN} bytes, this one has {member.size}")
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
            # Not plan.json: the plan that counts is the one that was sent.
            durable.move(path, place)


def _merge_checkpoints(folder: Path, place: Path) -> None:
    """Move new checkpoints in, and remove those that rotation removed there, if the newest of the others is whole."""
    durable.make_folder(place, exist_ok=True)
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    for name in sorted(there):
        if not (place / name).exists():
            durable.move(folder / name, place / name)
        elif manifest.find_damage(place / name) and not manifest.find_damage(folder / name):
            durable.put_folder(folder / name, place / name)  # whole ones never change
    # Numbers of more than eight digits are longer, and so the newer ones.
    newest = max(filter(CHECKPOINT.fullmatch, there), key=lambda name: (len(name), name), default=None)
    if newest is not None and not manifest.find_damage(place / newest):
        for path in place.iterdir():
            if path.name not in there and CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _append_journal(mine: Path, theirs: Path) -> None:
    """Append the part of a complete journal that this one lacks. The journal there begins as a copy of the one here. So
    if they differ, what came here in pieces may have been damaged on its way, and one with fewer unreadable lines and
    no fewer records replaces it; another is kept beside it, because the copy there is deleted next."""
    known = size_of(mine)
    with open_regular(theirs) as stream:
        if _begins_with(stream, mine):
            stream.seek(known)
            _append_whole_lines(mine, stream)
            return
    (here, here_unreadable), (there, there_unreadable) = _count_lines(mine.parent), _count_lines(theirs.parent)
    if there_unreadable < here_unreadable and there >= here:
        durable.move(theirs, mine)
        # The tracking store is sent everything again, and stores each point once. See decision 9.
        send_again(mine.parent)
    else:
        durable.move(theirs, mine.with_name(f"there-{JOURNAL}"))


def _append_whole_lines(file: Path, stream: IO[bytes]) -> None:
    rest = b""
    while chunk := stream.read(CHUNK):
        rest += chunk
        rest = rest[append_lines(file, rest) :]
        if len(rest) > LONGEST_LINE:
            raise _refuse("a line of its event log has more bytes than one can have")


def _begins_with(stream: IO[bytes], file: Path) -> bool:
    if not file.exists():
        return True
    with open_regular(file) as known:
        while chunk := known.read(CHUNK):
            if stream.read(len(chunk)) != chunk:
                return False
    return True


def _count_lines(folder: Path) -> tuple[int, int]:
    """Return how many lines of a journal hold a record, and how many hold none."""
    found = [record is None for record, _ in scan(folder)]
    return found.count(False), found.count(True)


class _TailStream:
    """A stream that keeps its last bytes: tarfile does not notice an archive that was cut between two members."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.tail = stream, b""

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        self.tail = (self.tail + data)[-len(END_OF_ARCHIVE) :]
        return data
