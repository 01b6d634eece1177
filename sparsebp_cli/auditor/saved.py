"""What autograd saved for the backward: where, how much, and whether anything that is used ever read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsebp_cli.auditor.storage import has_storage, key_of, num_bytes

if TYPE_CHECKING:
    from sparsebp_cli.auditor.module import AnyModules
    from sparsebp_cli.auditor.storage import Weights


@dataclass
class Kept:
    """One storage that is saved, by one operator or by several.

    Args:
        module: Whose forward saved it first.
        num_bytes: Of the whole storage.
        shape: Of the tensor that was saved first.
        numbers: Of the nodes that saved it.
        alive: How many of its packs still stand in the graph.
        is_unpacked: Whether the backward took it out.
        num_reads: By operators inside a backward.
        need: Leaves that those who read it lead to.
        padding_share: Of its rows, those of padding positions; 0 for what has no such rows.
        zero_share: Of its rows, those that only products with zero rows of the gradient read.
    """

    module: str
    num_bytes: int
    shape: tuple[int, ...]
    numbers: list[int] = field(default_factory=list)
    alive: int = 0
    is_unpacked: bool = False
    num_reads: int = 0
    need: int = 0
    padding_share: float = 0.0
    zero_share: float | None = None


class Packed:
    """What stands in the graph for a saved tensor, and tells when the graph lets go of it."""

    __slots__ = ("_kept", "_saved", "key", "tensor")

    def __init__(self, saved: SavedTensors, kept: Kept | None, key: int, tensor: Tensor) -> None:
        self._saved, self._kept, self.key, self.tensor = saved, kept, key, tensor
        if kept is not None:
            kept.alive += 1

    def unpack(self) -> Tensor:
        """Return the tensor, which the backward asks for."""
        if self._kept is not None:
            self._kept.is_unpacked = True
        return self.tensor

    def __del__(self) -> None:
        kept = self._kept
        if kept is not None:
            kept.alive -= 1
            if kept.alive == 0:
                self._saved.release(self.key, kept)


class SavedTensors:
    """Saved-tensor hooks of this thread.

    Args:
        modules: Knows which module runs.
        weights: Parameters are there anyway and are not counted.
    """

    def __init__(self, modules: AnyModules, weights: Weights) -> None:
        self._modules, self._weights = modules, weights
        self.by_key: dict[int, Kept] = {}
        self.released: list[Kept] = []
        self.is_active = self.has_seen = False
        self.rows: tuple[int, int, float] | None = None  # B, T, share of padding
        self._hooks: tuple[object, object] | None = None

    def start(self) -> None:
        """Put the hooks in, unless they or somebody else's are there."""
        if self._hooks is not None:
            self.is_active = True
        elif _top() is None and torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
            self._hooks = (self._pack, _unpack)
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)  # noqa: SLF001 - as the public class does
            self.is_active = self.has_seen = True

    def stop(self) -> None:
        """Take them out; as long as somebody else's are on top, they stay and do nothing."""
        self.is_active = False
        if self._hooks is not None and _top() == self._hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above
            self._hooks = None

    def release(self, key: int, kept: Kept) -> None:
        """Note that no graph holds a storage any more."""
        if self.by_key.get(key) is kept:
            del self.by_key[key]
        self.released.append(kept)

    def take_all(self) -> list[Kept]:
        """Return everything: what was let go of, and what graphs still hold."""
        return self.released + list(self.by_key.values())

    def _pack(self, tensor: Tensor) -> Packed:
        plain = tensor.detach()  # the tensor itself would keep its own graph alive
        if not has_storage(tensor):
            return Packed(self, None, 0, plain)
        key = key_of(tensor)
        if not self.is_active or self._weights.is_parameter(key):
            return Packed(self, None, key, plain)
        kept = self.by_key.get(key)
        if kept is None:
            kept = self.by_key[key] = Kept(self._modules.current, num_bytes(tensor), tuple(tensor.shape))
            kept.padding_share = self._padding_share(kept.shape)
        # A node takes its number when it is made, and saves next.
        kept.numbers.append(torch.autograd._get_sequence_nr() - 1)  # type: ignore[attr-defined]  # noqa: SLF001
        return Packed(self, kept, key, plain)

    def _padding_share(self, shape: tuple[int, ...]) -> float:
        if self.rows is None or not shape:
            return 0.0
        size, length, share = self.rows
        flat = shape[0] == size * length
        apart = len(shape) >= 2 and shape[:2] == (size, length)
        heads = len(shape) == 4 and (shape[0], shape[2]) == (size, length)
        return share if flat or apart or heads else 0.0


def _top() -> tuple[object, object] | None:
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001 - no public name
    return None if top is None else (top[0], top[1])


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()
