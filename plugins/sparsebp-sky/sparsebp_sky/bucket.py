"""Access the bucket through ``rclone``, which supports every store that SkyPilot mounts, with its own keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from sparsebp_cli.errors import UnreachableError
from sparsebp_cli.target import CommandResult, Tool

MISSING = 3  # rclone's exit code for a missing object or folder
ASK_SECONDS = 120.0
MOST_BYTES = 1 << 25  # most bytes of an object to read into memory


class Bucket:
    """A folder of a bucket."""

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self._tool = Tool(f"the bucket {remote}", lambda code, _errors: code == MISSING, timeout_seconds=ASK_SECONDS)

    def list(self, folder: str = "", *, deep: bool = False) -> dict[str, int]:
        """Return the sizes of a folder's objects by name, in bytes; names of folders end in a slash, with size 0."""
        words = ["rclone", "lsf", "--format", "sp", "--separator", ";"]
        words += ["--recursive", "--files-only"] if deep else []
        answer = self._tool.run([*words, self._path(folder)])
        found = {}
        for line in answer.text.splitlines() if answer.code == 0 else []:
            size, mark, name = line.partition(";")
            if not mark or not size.lstrip("-").isdigit():
                raise UnreachableError(
                    f"cannot read the list of the bucket {self.remote}: rclone lsf printed {line[:100]!r}"
                )
            found[name] = max(0, int(size))
        return found

    def read(self, name: str, *, begin: int = 0) -> bytes:
        """Return an object from a byte on; empty if it does not exist."""
        answer = self._tool.run(["rclone", "cat", "--offset", str(begin), "--count", str(MOST_BYTES), self._path(name)])
        return answer.out if answer.code == 0 else b""

    def receive(self, name: str, take: Callable[[IO[bytes]], None]) -> None:
        """Pass an object to ``take`` as a stream; raises ``UnreachableError`` if it was interrupted."""
        with self._tool.read(["rclone", "cat", self._path(name)]) as stream:
            take(stream)

    def write(self, name: str, feed: Callable[[IO[bytes]], None]) -> None:
        """Put an object that ``feed`` writes; it appears only when complete."""
        self._expect(self._tool.write(["rclone", "rcat", self._path(name)], feed))

    def put(self, name: str, data: bytes) -> None:
        """Put a small object."""
        self._expect(self._tool.run(["rclone", "rcat", self._path(name)], given=data))

    def remove(self, folder: str) -> None:
        """Remove a folder with all content; a missing folder is no error."""
        self._tool.run(["rclone", "purge", self._path(folder)])

    def _path(self, name: str) -> str:
        begin = "" if self.remote.endswith((":", "/")) else "/"
        return f"{self.remote}{begin}{name}" if name else self.remote

    def _expect(self, answer: CommandResult) -> None:
        if answer.code != 0:
            raise UnreachableError(f"cannot write the bucket {self.remote}: {answer.problem}")
