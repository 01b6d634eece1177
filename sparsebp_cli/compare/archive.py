"""Write runs into one archive file, to keep or share them, and read them back without manual unpacking.

    runs/ID/plan.json      with the password of a tracking store hidden
    runs/ID/journal.jsonl  the event log: all results
    runs/ID/...            labels.json, trial.json, cancelled, if the run has them
    studies/NAME.json      trials of a study that is archived as a whole, and the digests of their event logs
    environment.json       packages and hardware of each attempt, by run
    report.html            the comparison of these runs

Archives hold no models, checkpoints or worker output. Reading ignores other names in an archive.
"""

from __future__ import annotations

import atexit
import gzip
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO

from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.run import RunFolder, durable
from sparsebp_cli.run.budget import (
    LARGEST_JOURNAL,
    LARGEST_PLAN,
    LARGEST_SMALL,
    BudgetError,
    open_regular,
    open_tar,
    read_bounded,
    read_members,
)
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.run.label import FILE as LABELS
from sparsebp_cli.run.visible import mask

ENDINGS = (".tar.gz", ".tgz")
PLAN = "plan.json"
FILES = (PLAN, JOURNAL, LABELS, "trial.json", "cancelled")
RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
LARGEST_BYTES = LARGEST_JOURNAL  # unpacked size; a small file could unpack to any size
CHUNK = 1 << 20
MOST_NAMED = 5
PREFIX = "sparsebp-copy-"

Member = tuple[str, bytes]  # name in the archive, content


def check_archive_path(path: Path) -> None:
    """Raise ``UsageError`` if the path cannot be that of an archive."""
    if not path.name.endswith(ENDINGS):
        raise UsageError(f"the name of an archive must end in {' or '.join(ENDINGS)}, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.absolute().parent}")


def refuse_loss(path: Path, runs: Collection[str]) -> None:
    """Raise ``UsageError`` if the path already has a file that is no archive, or an archive with further runs: it may
    be the only copy of them."""
    if not os.path.lexists(path):
        return
    try:
        lost = {folder.name for folder in (open_archive(path) / "runs").glob("*")} - set(runs)
    except SparseBPError as error:
        raise UsageError(f"{error}; name another file; nothing was written") from None
    if lost:
        which = ", ".join(sorted(lost)[:MOST_NAMED]) + (", ..." if len(lost) > MOST_NAMED else "")
        raise UsageError(f"{path} exists and would lose {which}; name another file; nothing was written")


def list_members(run: RunFolder) -> Iterator[Member]:
    """Yield the files of a finished run, in the form in which an archive has them."""
    for name in FILES:
        try:
            content = read_bounded(run.path / name, LARGEST_BYTES)
        except FileNotFoundError:
            continue
        yield f"runs/{run.run_id}/{name}", _hide_password(content) if name == PLAN else content


def write_archive(path: Path, members: Iterable[Member]) -> None:
    """Write an archive atomically: if the disk is full or this process dies, nothing is written. Equal members give
    equal bytes. Raise ``SparseBPError`` if it cannot be written."""
    check_archive_path(path)
    try:
        with (
            durable.replacing(path) as file,
            # gzip's header gets neither name nor time, so that equal members give equal bytes.
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o644
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise SparseBPError(f"{path} was not written: {error.strerror or error}") from None


def open_archive(path: Path) -> Path:
    """Unpack the runs of an archive into a folder, which exists as long as this process, and return the folder. Raise
    ``UsageError`` for another kind of file, a damaged archive, or one that unpacks to more than 2 GiB."""
    folder = make_folder()
    try:
        with open_regular(path) as file, _Limited(fileobj=file, mode="rb") as packed:
            with open_tar(packed) as archive:
                for member in read_members(archive):
                    if _is_expected(member) and (content := archive.extractfile(member)):
                        # Check the size in the header before unpacking any byte. See decision 7.
                        _check_size(member)
                        _unpack(content, folder / member.name)
            while packed.read(CHUNK):  # read to the end, where the checksum is
                pass
    except BudgetError as error:
        raise UsageError(f"{path} is not an archive of `sparsebp archive`: {error}") from None
    except (tarfile.TarError, EOFError, ValueError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise UsageError(f"{path} is not an archive of `sparsebp archive`, or it is damaged: {error}") from None
    return folder


def _is_expected(member: tarfile.TarInfo) -> bool:
    parts: Sequence[str] = PurePosixPath(member.name).parts
    if not member.isreg() or member.issparse() or len(parts) < 2 or not RUN_ID.fullmatch(parts[1]):
        return False
    return (parts[0], *parts[2:]) in {("studies",), *(("runs", name) for name in FILES)}


def _check_size(member: tarfile.TarInfo) -> None:
    name = PurePosixPath(member.name).name
    largest = {JOURNAL: LARGEST_BYTES, PLAN: LARGEST_PLAN}.get(name, LARGEST_SMALL)
    if member.size > largest:
        raise BudgetError(
            f"the file {name} of an archive may have at most {largest} bytes, but this one has {member.size}"
        )


def make_folder() -> Path:
    """Return a folder for copies that exists as long as this process. Remove those of killed processes."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(OSError):  # another process removes it at this moment
            if owner.isdecimal() and left.lstat().st_uid == os.getuid() and not Path("/proc", owner).exists():
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _unpack(content: IO[bytes], place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as file:
        shutil.copyfileobj(content, file, CHUNK)


def _hide_password(plan: bytes) -> bytes:
    """Return a plan with the password of its tracking store hidden; return any other plan unchanged."""
    content = json.loads(plan)
    tracking = content["recipe"].get("tracking") or {}
    uri = tracking.get("uri")
    if not uri or mask(uri) == uri:
        return plan
    tracking["uri"] = mask(uri)
    return json.dumps(content, indent=1).encode()


class _Limited(gzip.GzipFile):
    """A packed stream that raises ``UsageError`` beyond the largest size of an archive."""

    taken = 0  # bytes read so far

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        if self.taken > LARGEST_BYTES:
            raise UsageError(f"an archive may unpack to at most {LARGEST_BYTES / 2**30:g} GiB, got more")
        return data
