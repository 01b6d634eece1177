"""Stores for encoded outputs: in host memory, or in a folder, each with a maximum size.

A store never evicts entries for new ones. Epochs visit all examples in turn, so an evicted entry would be needed next.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from sparsebp_cli.backward.kind.parameter.kept_output.form import EncodedOutput

_DIGEST = 16  # bytes of the checksum at the beginning of a file
_PART = ".part"  # suffix of a file during its write


class OutputStore(ABC):
    """Encoded outputs by key, all of one context. Outputs of other contexts are deleted."""

    num_bytes: int
    problem: str  # why the store accepts no more outputs; empty: it accepts them up to its size

    @abstractmethod
    def begin(self, context: bytes) -> None:
        """Store outputs of this context from now on."""

    @abstractmethod
    def get(self, key: bytes) -> EncodedOutput | None:
        """Return the output of a key; None if it is missing or cannot be read."""

    @abstractmethod
    def put(self, key: bytes, output: EncodedOutput) -> bool:
        """Store an output if it fits, and return whether it is stored."""


@final
class MemoryStore(OutputStore):
    """Outputs in the memory of this process."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes, self.problem = 0, ""
        self._max_bytes, self._context = max_bytes, b""
        self._outputs: dict[bytes, EncodedOutput] = {}

    def begin(self, context: bytes) -> None:
        if context != self._context:
            self._context, self.num_bytes = context, 0
            self._outputs.clear()

    def get(self, key: bytes) -> EncodedOutput | None:
        return self._outputs.get(key)

    def put(self, key: bytes, output: EncodedOutput) -> bool:
        size = output.num_bytes + len(key)
        if key not in self._outputs and self.num_bytes + size <= self._max_bytes:
            self._outputs[key] = output
            self.num_bytes += size
        return key in self._outputs


@final
class DiskStore(OutputStore):
    """Outputs in files, one for each. A killed process leaves a file complete or not at all.

    A file begins with a checksum of the rest, so the store need not wait for the disk: it ignores files that a power
    cut has damaged, and their outputs are computed again.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.num_bytes, self.problem = 0, ""
        self._folder, self._max_bytes, self._context = folder, max_bytes, b""
        self._sizes: dict[bytes, int] = {}

    def begin(self, context: bytes) -> None:
        if context == self._context:
            return
        self._context, self.num_bytes, self._sizes = context, 0, {}
        place = self._place
        try:
            for other in self._folder.iterdir() if self._folder.exists() else ():
                # Delete only our own folders, since the script has named this folder.
                if _is_key(other.name) and other.is_dir() and not other.is_symlink() and other != place:
                    shutil.rmtree(other)
            place.mkdir(parents=True, exist_ok=True)
            for key, size in self._scan(place):
                self._sizes[key] = size
                self.num_bytes += size
        except OSError as error:
            self.problem = f"{self._folder}: {error.strerror or error}"

    def get(self, key: bytes) -> EncodedOutput | None:
        if key not in self._sizes:
            return None
        try:
            return _read((self._place / key.hex()).read_bytes())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            self._forget(key)
            return None

    def put(self, key: bytes, output: EncodedOutput) -> bool:
        if self.problem or key in self._sizes:
            return key in self._sizes
        content = _write(output)
        if self.num_bytes + len(content) > self._max_bytes:
            return False
        path = self._place / key.hex()
        part = path.with_name(f"{path.name}{_PART}")
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            self.problem = f"{self._folder}: {error.strerror or error}"
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return False
        self._sizes[key] = len(content)
        self.num_bytes += len(content)
        return True

    @property
    def _place(self) -> Path:
        return self._folder / self._context.hex()

    def _scan(self, place: Path) -> Iterator[tuple[bytes, int]]:
        """Yield the entries of an earlier process, up to the present maximum size; remove the others."""
        room = self._max_bytes
        for path in sorted(path for path in place.iterdir() if _is_key(path.name.removesuffix(_PART))):
            size = path.stat().st_size
            if path.name.endswith(_PART) or size > room:
                path.unlink()
                continue
            room -= size
            yield bytes.fromhex(path.name), size

    def _forget(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key)
        with suppress(OSError):
            (self._place / key.hex()).unlink(missing_ok=True)


def _is_key(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _write(output: EncodedOutput) -> bytes:
    """Return an output as bytes: a checksum, a line that describes the tensors, and the tensors."""
    tensors = [output.values_TD] if output.scale_T1 is None else [output.values_TD, output.scale_T1]
    head = {"of": _name(output.dtype), "tensors": [[_name(t.dtype), list(t.shape)] for t in tensors]}
    body = json.dumps(head).encode() + b"\n"
    body += b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def _read(content: bytes) -> EncodedOutput:
    """Return the output from the bytes of :func:`_write`. Raises ValueError if they have changed."""
    body = content[_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != content[:_DIGEST]:
        raise ValueError("the checksum differs")
    line, _, rest = body.partition(b"\n")
    head, tensors = json.loads(line), list[Tensor]()
    for name, shape in head["tensors"]:
        dtype = getattr(torch, name)
        size = dtype.itemsize * torch.Size(shape).numel()
        # Copy to a bytearray, since a tensor over immutable bytes could be written to.
        tensors.append(torch.frombuffer(bytearray(rest[:size]), dtype=dtype).reshape(shape))
        rest = rest[size:]
    return EncodedOutput(tensors[0], tensors[1] if len(tensors) > 1 else None, getattr(torch, head["of"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
