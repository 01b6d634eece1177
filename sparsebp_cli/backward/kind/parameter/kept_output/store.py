"""Where encoded outputs are kept: in the memory of the host, or in a folder. Neither holds more than its bytes.

What does not fit is not kept, and nothing makes room for it: epochs visit all examples in turn, so whatever was dropped
for a later example would be the next to be asked for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from sparsebp_cli.backward.kind.parameter.kept_output.form import Encoded

_DIGEST = 16  # bytes of the checksum that a file begins with
_PART = ".part"  # ends the name of a file that is being written


class OutputStore(Protocol):
    """Encoded outputs by key, all of one context: those of another one are dropped."""

    num_bytes: int
    problem: str  # why nothing more is kept; empty: it is, as far as there is room

    def begin(self, context: bytes) -> None:
        """Keep outputs of this context from now on."""

    def get(self, key: bytes) -> Encoded | None:
        """Return what is kept; None: it is not, or not readable any more."""

    def put(self, key: bytes, output: Encoded) -> bool:
        """Keep an output if there is room, and return whether it is kept."""


@final
class MemoryStore:
    """Outputs in the memory of this process."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes, self.problem = 0, ""
        self._max_bytes, self._context = max_bytes, b""
        self._outputs: dict[bytes, Encoded] = {}

    def begin(self, context: bytes) -> None:
        if context != self._context:
            self._context, self.num_bytes = context, 0
            self._outputs.clear()

    def get(self, key: bytes) -> Encoded | None:
        return self._outputs.get(key)

    def put(self, key: bytes, output: Encoded) -> bool:
        size = output.num_bytes + len(key)
        if key not in self._outputs and self.num_bytes + size <= self._max_bytes:
            self._outputs[key] = output
            self.num_bytes += size
        return key in self._outputs


@final
class DiskStore:
    """Outputs in files, one each, that a killed process leaves whole or not at all.

    A file begins with a checksum of the rest, so nothing waits for the disk: what a power cut has torn is computed
    again.
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
                # Ours alone: the folder is one that a script has named.
                if _is_key(other.name) and other.is_dir() and not other.is_symlink() and other != place:
                    shutil.rmtree(other)
            place.mkdir(parents=True, exist_ok=True)
            for key, size in self._scan(place):
                self._sizes[key] = size
                self.num_bytes += size
        except OSError as error:
            self.problem = f"{self._folder}: {error.strerror or error}"

    def get(self, key: bytes) -> Encoded | None:
        if key not in self._sizes:
            return None
        try:
            return _read((self._place / key.hex()).read_bytes())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            self._forget(key)
            return None

    def put(self, key: bytes, output: Encoded) -> bool:
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
        """Yield what a process before has kept, up to the bytes that are allowed now; remove the rest."""
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


def _write(output: Encoded) -> bytes:
    """Return an output as bytes: a checksum, a line that describes the tensors, and these."""
    tensors = [output.values_TD] if output.scale_T1 is None else [output.values_TD, output.scale_T1]
    head = {"of": _name(output.dtype), "tensors": [[_name(t.dtype), list(t.shape)] for t in tensors]}
    body = json.dumps(head).encode() + b"\n"
    body += b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def _read(content: bytes) -> Encoded:
    """Return the output. Raises ValueError for bytes that are not those that were written."""
    body = content[_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != content[:_DIGEST]:
        raise ValueError("the checksum differs")
    line, _, rest = body.partition(b"\n")
    head, tensors = json.loads(line), list[Tensor]()
    for name, shape in head["tensors"]:
        dtype = getattr(torch, name)
        size = dtype.itemsize * torch.Size(shape).numel()
        # bytearray: a tensor over bytes could be written to, which they must not be.
        tensors.append(torch.frombuffer(bytearray(rest[:size]), dtype=dtype).reshape(shape))
        rest = rest[size:]
    return Encoded(tensors[0], tensors[1] if len(tensors) > 1 else None, getattr(torch, head["of"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
