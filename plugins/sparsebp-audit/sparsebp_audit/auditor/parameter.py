"""Track every parameter: whether it changes, what updates it, and whether its gradient is used or discarded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_audit.auditor.internals import sparse_values, storage_key
from sparsebp_audit.auditor.ledger import PassRecord
from sparsebp_audit.auditor.reach import UNKNOWN
from sparsebp_audit.auditor.storage import has_storage, key_of, refer

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # numbers cast at once


@dataclass
class ParameterHistory:
    """One parameter."""

    name: str  # name in its model
    bit: int  # bit in sets of leaves
    tensor: Tensor
    fingerprint_before: tuple[int, int]  # fingerprint when it was first seen
    steps: int = 0  # steps of optimizers that hold it
    steps_with_gradient: int = 0
    steps_with_rate: int = 0  # of those, with a nonzero learning rate
    steps_with_nonzero: int = 0  # of those, with a gradient that was not all zero
    idle_bytes: int = 0  # optimizer state at the latest step, if the parameter was frozen then
    grad_bytes: int = 0  # largest size of its gradient after a backward or at the start of a step

    @property
    def has_moved(self) -> bool:
        """Whether any of its numbers has changed."""
        return fingerprint(self.tensor) != self.fingerprint_before

    def record_size(self) -> None:
        """Record the current size of its gradient."""
        if self.tensor.grad is not None:
            grad = _numbers(self.tensor.grad)
            self.grad_bytes = max(self.grad_bytes, grad.numel() * grad.element_size())


@dataclass
class Parameters:
    """All parameters seen so far."""

    histories: dict[Tensor, ParameterHistory] = field(default_factory=dict)
    by_name: dict[str, ParameterHistory] = field(default_factory=dict)
    captured: int = 0  # bits of parameters whose gradient `torch.autograd.grad` returned
    optimizers: dict[torch.optim.Optimizer, int] = field(default_factory=dict)  # with their step counts
    gathered: dict[Tensor, ParameterHistory] = field(default_factory=dict)  # parameters gathered from sharded ones
    num_steps: int = 0  # of the optimizer with most steps
    is_ahead: bool = False  # the latest step was the first with its number, not a second optimizer's
    _bits: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, parameter: Tensor) -> None:
        """Add a parameter; a known one keeps its name."""
        if parameter not in self.histories:
            history = ParameterHistory(name, self.new_bit(name), parameter, fingerprint(parameter))
            self.histories[parameter] = self.by_name[name] = history

    def new_bit(self, name: str) -> int:
        """Return the bit of a name in sets of leaves."""
        return self._bits.setdefault(name, 1 << (len(self._bits) + 1))

    def bit_of(self, name: str) -> int:
        """Return the bit of a parameter."""
        return self.by_name[name].bit if name in self.by_name else UNKNOWN

    def bits_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bits of the tensors that are known parameters."""
        bits = 0
        for tensor in tensors:
            history = self.find(tensor)
            bits |= 0 if history is None else history.bit
        return bits

    def find(self, tensor: Tensor) -> ParameterHistory | None:
        """Return the history of a parameter, or of the sharded parameter behind it; None if unknown."""
        return self.histories.get(tensor) or self.gathered.get(tensor)

    def start_step(
        self, optimizer: torch.optim.Optimizer, passes: Iterable[PassRecord], *, is_again: bool = False
    ) -> None:
        """Record the gradients that an optimizer is about to use. ``passes`` may have gradients pending for it.
        ``is_again``: this step has called its closure before."""
        found = lost = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self.histories:
                    self.add(f"parameter {len(self.histories)}", parameter)
                history = self.histories[parameter]
                history.steps += not is_again
                history.idle_bytes = 0 if parameter.requires_grad else _state_bytes(optimizer.state.get(parameter))
                if parameter.grad is None:
                    lost |= history.bit
                    continue
                found |= history.bit
                history.record_size()
                if is_again:
                    continue
                history.steps_with_gradient += 1
                if float(group.get("lr", 1.0)):
                    history.steps_with_rate += 1
                    history.steps_with_nonzero += bool(_numbers(parameter.grad).any())
        for one in passes:
            one.discarded |= one.pending & lost
            one.used |= one.pending & found
        if is_again:
            return
        made = self.optimizers[optimizer] = self.optimizers.get(optimizer, 0) + 1
        self.is_ahead, self.num_steps = made > self.num_steps, max(made, self.num_steps)

    def clear(self, tensors: Iterable[Tensor], passes: Iterable[PassRecord]) -> None:
        """Record that the gradients of some parameters are about to be cleared."""
        bits = self.bits_of(tensors)
        for one in passes:
            one.discarded |= one.pending & bits

    def clear_missing(self, passes: list[PassRecord]) -> None:
        """Record gradients that were removed after they were computed."""
        if any(one.pending for one in passes):
            waiting = {
                id(history) for history in self.gathered.values()
            }  # FSDP may keep gradients until it reduces them
            self.clear(
                [p for p, history in self.histories.items() if p.grad is None and id(history) not in waiting], passes
            )

    def gradients(self) -> dict[int, tuple[int, StorageWeakRef]]:
        """Record the size of all gradients; return the bits of existing ones by storage, with a weak reference."""
        found = {}
        for parameter, history in self.histories.items():
            history.record_size()
            if parameter.grad is not None and has_storage(parameter.grad):
                found[key_of(parameter.grad)] = history.bit, refer(parameter.grad)
        return found

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of parameters and of their gradients."""
        own = {storage_key(p): p.untyped_storage().nbytes() for p in map(_local, self.histories)}
        return sum(own.values()), sum(history.grad_bytes for history in self.histories.values())

    def state_bytes(self, of: set[str] | None = None) -> int:
        """Return the bytes of optimizer state, of the named parameters or of all."""
        count = 0
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                history = self.histories.get(parameter) if isinstance(parameter, Tensor) else None
                if of is None or (history is not None and history.name in of):
                    count += _state_bytes(state)
        return count


def _state_bytes(state: Mapping[str, object] | None) -> int:
    """Return the bytes of an optimizer's state of one parameter."""
    tensors = [value for value in (state or {}).values() if isinstance(value, Tensor)]
    return sum(_local(value).numel() * value.element_size() for value in tensors)


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Return two checksums of a tensor's bits, plain and weighted by position; synchronises with its device."""
    plain = _local(tensor.detach())
    if plain.numel() and not plain.untyped_storage().nbytes():
        return 0, 0  # its memory is freed for now, as FSDP does between uses
    flat = plain.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words, first, second = flat.view(_WORDS[flat.element_size()]), 0, 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(1, part.numel() + 1, device=part.device) % 8191
        first += int(part.sum())
        second += int((part * place).sum()) + start
    return first, second


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this process holds."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = to_local() if to_local is not None else tensor
    return local.data if isinstance(local, nn.Parameter) else local


def _numbers(grad: Tensor) -> Tensor:
    """Return the part of a gradient that needs memory: entries of a sparse one, the local part of a sharded one."""
    local = _local(grad)
    return sparse_values(local) if local.layout is torch.sparse_coo else local
