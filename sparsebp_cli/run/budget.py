"""Open untrusted files (a run's folder, an archive, another machine's files) with limits on their size.

A few kilobytes can unpack to gigabytes, so every limit applies before the content is in memory. Reading a pipe may
block for ever, and a device may never end. So only this module opens files of a run; a test checks this for the
packages that read them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from io import BufferedReader, FileIO, UnsupportedOperation
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn, Self

from sparsebp_cli.errors import UsageError

MIB = 1 << 20
LARGEST_PLAN = 4 * MIB  # ours have a few kilobytes, and up to 200,000 characters of uncommitted changes
LARGEST_SMALL = MIB  # of labels and similar files
LARGEST_JOURNAL = 2 << 30
LARGEST_ARTIFACT = 64 * MIB  # of other JSON files: the record of a study, the index of a model's weights
LONGEST_LINE = 16 * MIB  # of an event log: the losses of half a million validation examples
LARGEST_HEADER = 64 * 1024  # of an archive member with a long name: a path has at most 4,096 bytes
LARGEST_HEADERS = 16 * MIB  # of all members together
MOST_MEMBERS = 20_000  # 4,000 runs in an archive; a run's folder has a few hundred
EXTENDED = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}


class BudgetError(UsageError):
    """A file or archive is larger than any that SparseBP writes for a run."""


def size_of(file: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:  # one system call: the folder may be deleted between two
        return file.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading. Raise ``OSError`` if it cannot be read. Raise ``UnsupportedOperation`` (an ``OSError``
    and a ``ValueError``) if it is not a regular file: a pipe may block for ever, a device may never end."""
    # O_NONBLOCK: opening a pipe would wait for its writer.
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UnsupportedOperation(f"{file} is not a regular file")
    return os.fdopen(opened, "rb")


def open_to_append(file: Path) -> FileIO:
    """Open or create a file to append, unbuffered. Raise ``OSError`` as :func:`open_regular` does: opening a pipe for
    writing would wait for a reader."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(file, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe without a reader, or a socket
            raise
        raise UnsupportedOperation(f"{file} is not a regular file") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UnsupportedOperation(f"{file} is not a regular file")
    return FileIO(opened, "ab")


def read_bounded(file: Path, largest: int) -> bytes:
    """Return the content of a file of at most ``largest`` bytes. Raise ``ValueError`` if it is larger or not a regular
    file, ``OSError`` if it cannot be read."""
    with open_regular(file) as stream:
        content = stream.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"the file has more than the allowed {largest} bytes")
    return content


def read_json(file: Path, largest: int) -> Any:
    """Return the content of a JSON file of at most ``largest`` bytes. Raise as :func:`read_bounded` does, and
    ``ValueError`` if it is not JSON or is nested too deeply."""
    try:
        return json.loads(read_bounded(file, largest))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def read_lines(stream: IO[bytes]) -> Iterator[tuple[bytes | None, int]]:
    """Yield each line and its number of bytes. Yield None for a line that is longer than an event log allows."""
    while line := stream.readline(LONGEST_LINE):
        size = len(line)
        is_long = size == LONGEST_LINE and not line.endswith(b"\n")
        while is_long and not line.endswith(b"\n") and (line := stream.readline(LONGEST_LINE)):
            size += len(line)
        yield (None, size) if is_long and line.endswith(b"\n") else (line, size)


def open_tar(stream: Any) -> tarfile.TarFile:
    """Open a tar stream that counts headers and members before tarfile reads their content. Read it with
    :func:`read_members`."""

    # A class for each archive, because tarfile creates the members and the counts belong to one archive.
    class CountedInfo(_CountedInfo):
        num_members = header_bytes = 0

    archive: tarfile.TarFile = tarfile.open(  # noqa: SIM115 - the caller closes it
        fileobj=stream, mode="r|", errorlevel=2, tarinfo=CountedInfo
    )
    return archive


def read_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an opened archive. Raise ``BudgetError`` if there are too many, or a header is too large."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # else tarfile keeps all of them
        yield member


class _CountedInfo(tarfile.TarInfo):
    num_members: ClassVar[int] = 0
    header_bytes: ClassVar[int] = 0

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        cls.num_members += 1
        if cls.num_members > MOST_MEMBERS:
            raise BudgetError(f"an archive may contain at most {MOST_MEMBERS} files, got more")
        if found.type in EXTENDED:
            cls.header_bytes += found.size
            if found.size > LARGEST_HEADER or cls.header_bytes > LARGEST_HEADERS:
                raise BudgetError(f"a name or tar header may have at most {LARGEST_HEADER} bytes, got {found.size}")
        if found.type == tarfile.GNUTYPE_SPARSE:
            _refuse_holes()
        return found

    # Overrides a private method of tarfile, which reads a list of any length.
    def _proc_gnusparse_10(self, *_: object) -> None:
        _refuse_holes()


def _refuse_holes() -> NoReturn:
    raise BudgetError("an archive must not contain sparse files (files with holes)")
