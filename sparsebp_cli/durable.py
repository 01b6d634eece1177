"""Files and folders that survive a power cut: as they were, or as they are to be, and never half of either.

A rename alone is not enough. File systems may put the new name on the disk before the content that it names: after a
power cut the file exists and is empty (seen with XFS, and with ext4 for files under a new name). So each function here
writes beside the place, waits for the disk, renames, and waits until the disk has the new name as well.

Everything of a run but caches is written through this module; a test holds the package to it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MANIFEST = "manifest.json"
PART = ".part-"  # begins the name of whatever is not complete yet


def write_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file, or replace it as a whole: if this fails, or the power does, the old file stays as it is. With
    ``private`` only its owner may read it. Raises ``OSError``."""
    with replacing(path) as stream:
        if private:
            os.fchmod(stream.fileno(), 0o600)
        stream.write(content.encode() if isinstance(content, str) else content)


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file where there is none, and return whether it was: of two that write at once, one does. If this fails,
    or the power does, there is none. Raises ``OSError``."""
    part = path.with_name(f"{PART}new-{path.name[:200]}.{os.getpid()}-{threading.get_ident()}")
    write_file(part, content)
    try:
        os.link(part, path)  # whole at once, and never in the place of another: a rename would replace it
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if path.exists():
            return False
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)
    return True


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a stream whose content becomes the file when the block ends without an error; else the file stays."""
    if path.exists() and not path.is_file():  # such as /dev/stdout: nothing can be renamed over a device
        with path.open("wb") as stream:
            yield stream
        return
    path = path.resolve()  # a link stays one, and so its target is what is replaced
    # Threads and processes may write one file at once; each has its own part, and the last one counts.
    # A name has 255 bytes at most, and the part adds to it.
    part = path.with_name(f"{PART}{path.name[:200]}.{os.getpid()}-{threading.get_ident()}")
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def append(path: Path, content: bytes) -> None:
    """Append to a file, and wait for the disk. Raises ``OSError``, and then nothing was appended."""
    is_new = not path.exists()
    with path.open("ab", buffering=0) as stream:
        begin = stream.seek(0, os.SEEK_END)
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:  # such as a full disk: the next line would continue half a line
            stream.truncate(begin)
            raise
    if is_new:
        sync(path.parent)


def cut(path: Path, size: int) -> None:
    """Take away what a file has beyond so many bytes, such as half a line, and wait for the disk."""
    with path.open("r+b") as stream:
        stream.truncate(size)
        os.fsync(stream.fileno())


def make_folder(path: Path, *, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Make a folder and those above it, and wait until the disk has their names."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=exist_ok)
    for folder in missing:
        sync(folder.parent)


def move(source: Path, place: Path) -> None:
    """Rename a file or folder within a file system, after its whole content is on the disk; ``place`` is free, or a
    file that is replaced."""
    sync_content(source)
    before = source.parent
    source.replace(place)
    sync(place.parent)
    # The folder that lost the name, too.
    if before != place.parent:
        sync(before)


def put_folder(part: Path, place: Path) -> None:
    """Let a folder that was written beside ``place`` take that name, and remove the one that had it. If the power
    fails in between, one of the two is complete, here or as ``.part-old-NAME``."""
    old = place.with_name(f"{PART}old-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    sync_content(part)
    if place.exists():
        place.rename(old)
    part.rename(place)
    sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def filling(place: Path) -> Iterator[Path]:
    """Yield a folder beside ``place`` that takes this name when the block ends without an error; else nothing is left
    of it. What a killed process left of the same is removed. Raises ``FileExistsError`` if a folder with content, or a
    file, has the name by then, and ``OSError``."""
    make_folder(place.parent, exist_ok=True)
    for left in place.parent.glob(f"{PART}{glob.escape(place.name[:200])}.*"):
        with _held(left) as is_ours:
            if is_ours:
                shutil.rmtree(left, ignore_errors=True)
    part = place.with_name(f"{PART}{place.name[:200]}.{os.getpid()}-{threading.get_ident()}")
    part.mkdir()
    try:
        with _held(part):
            yield part
            sync_content(part)
            try:
                part.rename(place)  # over an empty folder, too, and over nothing else
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise FileExistsError(errno.EEXIST, "exists and is not empty", str(place)) from None
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync(place.parent)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, and yield whether no other process had it; the system ends it with the process."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a whole folder; a link alone, never what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_content(path: Path) -> None:
    """Wait until the disk has a file, or all files and folders below a folder."""
    if path.is_symlink():
        return
    if path.is_dir():
        for child in path.iterdir():
            sync_content(child)
    sync(path)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, more: Mapping[str, object] | None = None) -> None:
    """List the sha256 of every file of a folder in its manifest; :func:`find_damage` compares. ``more`` is written
    beside the list."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    listed = {str(file.relative_to(folder)): digest(file) for file in files}
    # No wait for the disk here: `put_folder` waits for the whole folder.
    (folder / MANIFEST).write_text(
        json.dumps({"format": 1, "sha256": listed, **(more or {})}, indent=1), encoding="utf-8"
    )


def find_damage(folder: Path) -> str:
    """Return what is wrong with a folder by its manifest, in one line; empty if every file that it lists is whole. A
    folder without a manifest cannot be verified, and so counts as damaged."""
    try:
        listed: dict[str, str] = json.loads((folder / MANIFEST).read_bytes())["sha256"]
        for name, expected in listed.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{name!r} leads out of it"
            if digest(folder / name) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return "" if listed else "the manifest is empty"


def digest(file: Path) -> str:
    """Return the sha256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
