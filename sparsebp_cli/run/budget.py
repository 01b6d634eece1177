"""How files are opened that come from somebody else (a run's folder, an archive, another machine), and how large
they may be.

A few kilobytes can unpack to gigabytes, so every limit holds before the content is in memory. A pipe waits for ever,
and a device has no end: so files of a run are opened by this module, to which a test holds the packages that do.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO, UnsupportedOperation
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn, Protocol, Self

from sparsebp_cli.errors import UsageError

MIB = 1 << 20
LARGEST_PLAN = 4 * MIB  # ours have some kilobytes, and up to 200,000 characters of uncommitted changes
LARGEST_SMALL = MIB  # of labels and the like
LARGEST_JOURNAL = 2 << 30
LARGEST_ARTIFACT = 64 * MIB  # of a run in a store: its journal without the metrics of steps
LONGEST_LINE = 16 * MIB  # of a journal: the losses of half a million validation examples
LARGEST_HEADER = 64 * 1024  # of a member of an archive with a long name: a path has 4,096 bytes
LARGEST_HEADERS = 16 * MIB  # of all members together
MOST_MEMBERS = 20_000  # 4,000 runs in an archive; a run's folder has some hundred
EXTENDED = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}


class BudgetError(UsageError):
    """Something is larger than it can be in a run of SparseBP."""


def open_regular(file: Path) -> BufferedReader:
    """Open a file to read. Raises ``OSError`` if it cannot be read, and ``UnsupportedOperation``, which is an
    ``OSError`` and a ``ValueError``, for what is no regular file: a pipe waits for ever, a device has no end."""
    # O_NONBLOCK: opening a pipe would wait for its writer.
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UnsupportedOperation(f"{file} is not a regular file")
    return os.fdopen(opened, "rb")


def open_to_append(file: Path) -> FileIO:
    """Open a file, or make it, to append without a buffer. Raises ``OSError`` as :func:`open_regular` does: opening a
    pipe to write waits for a reader, which may never come."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(file, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a pipe without a reader, and of a socket
            raise
        raise UnsupportedOperation(f"{file} is not a regular file") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UnsupportedOperation(f"{file} is not a regular file")
    return FileIO(opened, "ab")


def read_bounded(file: Path, largest: int) -> bytes:
    """Return the content of a file of at most so many bytes. Raises ``ValueError`` for a larger one, and one that is
    no regular file; ``OSError`` if it cannot be read."""
    with open_regular(file) as stream:
        content = stream.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest} bytes")
    return content


def read_json(file: Path, largest: int) -> Any:
    """Return what a file of JSON of at most so many bytes holds. Raises as :func:`read_bounded` does, and
    ``ValueError`` for what is no JSON or is nested too deeply."""
    try:
        return json.loads(read_bounded(file, largest))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


_limit_lock = threading.Lock()
_limits: list[int] = []  # in force now, one a block


@contextmanager
def limit_files(largest: int) -> Iterator[None]:
    """Let no file that this process or a child writes meanwhile become larger: such a write raises ``OSError``. It
    bounds what a library downloads, whose own buffers nobody else can count. Of several blocks at once the largest
    limit is in force."""
    with _limit_lock:
        _limits.append(largest)
        _apply_limits()
    try:
        yield
    finally:
        with _limit_lock:
            _limits.remove(largest)
            _apply_limits()


_given_limit = resource.getrlimit(resource.RLIMIT_FSIZE)


def _apply_limits() -> None:
    soft, hard = _given_limit
    wanted = max(_limits, default=soft)
    known = [limit for limit in (wanted, soft) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(known, default=resource.RLIM_INFINITY), hard))


def read_lines(stream: IO[bytes]) -> Iterator[tuple[bytes | None, int]]:
    """Yield each line with its number of bytes; None for one that is longer than a journal's can be."""
    while line := stream.readline(LONGEST_LINE):
        size = len(line)
        is_long = size == LONGEST_LINE and not line.endswith(b"\n")
        while is_long and not line.endswith(b"\n") and (line := stream.readline(LONGEST_LINE)):
            size += len(line)
        yield (None, size) if is_long and line.endswith(b"\n") else (line, size)


class Readable(Protocol):
    """A stream of bytes, as far as a tar file needs it."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; fewer only at the end."""


def open_tar(stream: Readable) -> tarfile.TarFile:
    """Open a tar stream whose headers and members are counted before tarfile reads what belongs to them; read it with
    :func:`read_members`."""

    # A class of its own: tarfile makes the members, and the counts are those of one archive.
    class CountedInfo(_CountedInfo):
        num_members = header_bytes = 0  # of this archive

    archive: tarfile.TarFile = tarfile.open(  # type: ignore[call-overload]  # noqa: SIM115 - the caller closes it
        fileobj=stream, mode="r|", errorlevel=2, tarinfo=CountedInfo
    )
    return archive


def read_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an opened archive. Raises ``BudgetError`` for too many, and for one that is too large."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all of them
        yield member


class _CountedInfo(tarfile.TarInfo):
    num_members: ClassVar[int] = 0
    header_bytes: ClassVar[int] = 0

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        cls.num_members += 1
        if cls.num_members > MOST_MEMBERS:
            raise BudgetError(f"an archive may have {MOST_MEMBERS} members, this one has more")
        if found.type in EXTENDED:
            cls.header_bytes += found.size
            if found.size > LARGEST_HEADER or cls.header_bytes > LARGEST_HEADERS:
                raise BudgetError(
                    f"the name or the header of a member has {found.size} bytes, at most {LARGEST_HEADER}"
                )
        if found.type == tarfile.GNUTYPE_SPARSE:
            _refuse_holes()
        return found

    def _proc_gnusparse_10(self, *_: object) -> None:  # of tarfile, private: reads a list of any length
        _refuse_holes()


def _refuse_holes() -> NoReturn:
    raise BudgetError("a member is a file with holes, which a few bytes make as large as one likes")
