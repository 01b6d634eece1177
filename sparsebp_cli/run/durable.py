"""Write files and folders that survive a power cut: afterwards each is complete, either old or new.

A rename alone is not enough. File systems may write the new name to the disk before the content. After a power cut the
file then exists and is empty (seen with XFS, and with ext4 for files under a new name). So each function here writes
beside the final path, waits for the disk, renames, and waits until the disk has the new name too.

All files of a run except caches are written through this module; a test checks this.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PART = ".part-"  # prefix of the names of incomplete files and folders


def write_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file, or replace it atomically. After a failure or power cut the old file is unchanged. With ``private``
    only its owner may read it. Raise ``OSError`` if it cannot be written."""
    with replacing(path) as stream:
        if private:
            os.fchmod(stream.fileno(), 0o600)
        stream.write(content.encode() if isinstance(content, str) else content)


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file if there is none, and return whether it was written; of two simultaneous writers one succeeds. After
    a failure or power cut there is no file. Raise ``OSError`` if it cannot be written."""
    part = _name_part(path, f"{PART}new-")
    write_file(part, content)
    try:
        os.link(part, path)  # atomic, and never replaces a file, as a rename would
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


def _name_part(path: Path, prefix: str = PART) -> Path:
    """Return the temporary path for writing ``path``. Threads and processes may write one file at the same time. Each
    has its own temporary path, and the last rename wins."""
    return path.with_name(f"{prefix}{_shorten(path.name)}.{os.getpid()}-{threading.get_ident()}")


def _shorten(name: str) -> str:
    """Return the first 200 bytes of a name, because names have at most 255 and temporary names are longer."""
    return os.fsencode(name)[:200].decode(errors="ignore")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a stream whose content replaces the file only if the block ends without an error."""
    if path.exists() and not path.is_file():  # such as /dev/stdout: nothing can be renamed over a device
        with path.open("wb") as stream:
            yield stream
        return
    path = path.resolve()  # replace the target of a link, not the link
    part = _name_part(path)
    try:
        with _open_part(part) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            _give_name(stream, part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _open_part(part: Path) -> IO[bytes]:
    """Open an unnamed file in the folder of ``part``; it vanishes if this process is killed. If the file system has no
    unnamed files, open ``part`` itself."""
    try:
        descriptor = os.open(part.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
    except OSError:  # also for a missing or full folder: then the next line names it
        return part.open("wb")
    return os.fdopen(descriptor, "w+b")


def _give_name(stream: IO[bytes], part: Path, path: Path) -> None:
    """Give a synced file its name. If the name exists, link to ``part`` first and replace the file."""
    unnamed = f"/proc/self/fd/{stream.fileno()}"
    try:
        if not part.exists():
            os.link(unnamed, path, src_dir_fd=stream.fileno())  # with this option Python follows the link in /proc
            return
    except FileExistsError:
        os.link(unnamed, part, src_dir_fd=stream.fileno())
    except OSError:  # such as a machine without /proc
        stream.seek(0)
        with part.open("wb") as named:
            shutil.copyfileobj(stream, named)
            named.flush()
            os.fsync(named.fileno())
    part.replace(path)


def append(path: Path, content: bytes) -> None:
    """Append to a file and wait for the disk. Raise ``OSError`` if this fails; then nothing was appended."""
    is_new = not path.exists()
    with path.open("ab", buffering=0) as stream:
        begin = stream.seek(0, os.SEEK_END)
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:  # such as a full disk: otherwise the next line would continue an incomplete one
            stream.truncate(begin)
            raise
    if is_new:
        sync(path.parent)


def cut(path: Path, size: int) -> None:
    """Truncate a file to ``size`` bytes, for example to remove an incomplete line, and wait for the disk."""
    with path.open("r+b") as stream:
        stream.truncate(size)
        os.fsync(stream.fileno())


def make_folder(path: Path, *, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Create a folder and its parents, and wait until the disk has their names."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=exist_ok)
    for folder in missing:
        sync(folder.parent)


def move(source: Path, place: Path) -> None:
    """Rename a file or folder within a file system, after its whole content is on the disk. ``place`` must be free, or
    a file, which is replaced."""
    sync_content(source)
    before = source.parent
    source.replace(place)
    sync(place.parent)
    # Also sync the folder that lost the name.
    if before != place.parent:
        sync(before)


def put_folder(part: Path, place: Path) -> None:
    """Rename a folder that was written beside ``place`` to this name, and remove the previous folder. After a power cut
    one of the two is complete, here or as ``.part-old-NAME``."""
    old = place.with_name(f"{PART}old-{_shorten(place.name)}")
    shutil.rmtree(old, ignore_errors=True)
    sync_content(part)
    if place.exists():
        place.rename(old)
    part.rename(place)
    sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def filling(place: Path) -> Iterator[Path]:
    """Yield a folder beside ``place`` that is renamed to ``place`` if the block ends without an error; otherwise it is
    removed. Leftovers of killed processes are removed first. Raise ``FileExistsError`` if ``place`` is by then a file
    or a non-empty folder, and ``OSError`` if it cannot be written."""
    make_folder(place.parent, exist_ok=True)
    for left in place.parent.glob(f"{PART}{glob.escape(_shorten(place.name))}.*"):
        with _held(left) as is_ours:
            if is_ours:
                shutil.rmtree(left, ignore_errors=True)
    part = _name_part(place)
    part.mkdir()
    try:
        with _held(part):
            yield part
            sync_content(part)
            try:
                part.rename(place)  # this replaces an empty folder, but nothing else
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
    """Try to lock a folder, and yield whether this succeeded. The system releases the lock when the process ends."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # locked by another process, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a whole folder. Of a link, remove only the link."""
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
