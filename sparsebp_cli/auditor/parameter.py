"""What becomes of every parameter: does it move, who updates it, and is its gradient used or thrown away?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_cli.auditor.ledger import PassRecord
from sparsebp_cli.auditor.reach import UNKNOWN
from sparsebp_cli.auditor.storage import has_storage, key_of, refer

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # numbers that are cast at once


@dataclass
class ParameterHistory:
    """One parameter.

    Args:
        name: In its model.
        bit: Among the leaves.
        tensor: The parameter.
        print_before: Of its numbers when it was first seen.
        steps: Of optimizers that hold it.
        steps_with_gradient: Of them, those that found a gradient.
        steps_with_rate: Of those, those with a learning rate other than zero.
        chances: Of those, those whose gradient was not all zero.
        grad_bytes: What its gradient occupied at most, after a backward pass or when an optimizer began a step.
    """

    name: str
    bit: int
    tensor: Tensor
    print_before: tuple[int, int]
    steps: int = 0
    steps_with_gradient: int = 0
    steps_with_rate: int = 0
    chances: int = 0
    grad_bytes: int = 0

    @property
    def has_moved(self) -> bool:
        """Whether any of its numbers is another one than at first."""
        return fingerprint(self.tensor) != self.print_before

    def weigh(self) -> None:
        """Note what its gradient occupies now."""
        if self.tensor.grad is not None:
            grad = _numbers(self.tensor.grad)
            self.grad_bytes = max(self.grad_bytes, grad.numel() * grad.element_size())


@dataclass
class Parameters:
    """Every parameter that was met.

    Args:
        fates: By parameter.
        by_name: The same by name.
        captured: Bits of those whose gradient ``torch.autograd.grad`` returned to somebody.
        optimizers: That made a step, with the number of their steps.
        num_steps: Steps of the optimizer that made most.
        is_ahead: Whether the last step that began was the first of its number: not that of another optimizer beside.
        stand_ins: Whole parameters that were gathered of sharded ones, with what is known of those.
    """

    fates: dict[Tensor, ParameterHistory] = field(default_factory=dict)
    by_name: dict[str, ParameterHistory] = field(default_factory=dict)
    captured: int = 0
    optimizers: dict[Any, int] = field(default_factory=dict)
    stand_ins: dict[Tensor, ParameterHistory] = field(default_factory=dict)
    num_steps: int = 0
    is_ahead: bool = False
    _bits: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, parameter: Tensor) -> None:
        """Take in a parameter; one that is known keeps its name.

        Args:
            name: Its name.
            parameter: It.
        """
        if parameter not in self.fates:
            fate = ParameterHistory(name, self.new_bit(name), parameter, fingerprint(parameter))
            self.fates[parameter] = self.by_name[name] = fate

    def new_bit(self, name: str) -> int:
        """Return the bit of a name among the leaves."""
        return self._bits.setdefault(name, 1 << (len(self._bits) + 1))

    def bit_of(self, name: str) -> int:
        """Return the bit of a parameter."""
        return self.by_name[name].bit if name in self.by_name else UNKNOWN

    def bits_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bits of those tensors that are known."""
        bits = 0
        for tensor in tensors:
            fate = self.find(tensor)
            bits |= 0 if fate is None else fate.bit
        return bits

    def find(self, tensor: Tensor) -> ParameterHistory | None:
        """Return what is known of a parameter, or of the one that it stands for; None for nothing."""
        return self.fates.get(tensor) or self.stand_ins.get(tensor)

    def start_step(
        self, optimizer: torch.optim.Optimizer, passes: Iterable[PassRecord], *, is_again: bool = False
    ) -> None:
        """Note what an optimizer is about to use.

        Args:
            optimizer: About to make a step, or inside one with gradients of a closure.
            passes: Whose gradients may wait for it.
            is_again: Whether the closure has been called in this step before.
        """
        found = lost = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self.fates:
                    self.add(f"parameter {len(self.fates)}", parameter)
                fate = self.fates[parameter]
                fate.steps += not is_again
                if parameter.grad is None:
                    lost |= fate.bit
                    continue
                found |= fate.bit
                fate.weigh()
                if is_again:
                    continue
                fate.steps_with_gradient += 1
                if float(group.get("lr", 1.0)):
                    fate.steps_with_rate += 1
                    fate.chances += bool(_numbers(parameter.grad).any())
        for one in passes:
            one.discarded |= one.pending & lost
            one.used |= one.pending & found
        if is_again:
            return
        made = self.optimizers[optimizer] = self.optimizers.get(optimizer, 0) + 1
        self.is_ahead, self.num_steps = made > self.num_steps, max(made, self.num_steps)

    def clear(self, tensors: Iterable[Tensor], passes: Iterable[PassRecord]) -> None:
        """Note that gradients are about to be cleared.

        Args:
            tensors: Parameters whose gradients are.
            passes: Whose gradients may not have been used yet.
        """
        bits = self.bits_of(tensors)
        for one in passes:
            one.discarded |= one.pending & bits

    def clear_missing(self, passes: list[PassRecord]) -> None:
        """Note gradients that somebody took away since they were computed."""
        if any(one.pending for one in passes):
            waiting = {id(fate) for fate in self.stand_ins.values()}  # FSDP may keep gradients until it reduces them
            self.clear([p for p, fate in self.fates.items() if p.grad is None and id(fate) not in waiting], passes)

    def gradients(self) -> dict[int, tuple[int, StorageWeakRef]]:
        """Weigh all gradients, and return the bits of those that have one, by its storage, which keeps its number."""
        found = {}
        for parameter, fate in self.fates.items():
            fate.weigh()
            if parameter.grad is not None and has_storage(parameter.grad):
                found[key_of(parameter.grad)] = fate.bit, refer(parameter.grad)
        return found

    def bytes(self) -> tuple[int, int]:
        """Return what parameters and their gradients occupy."""
        own = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in map(_local, self.fates)}  # noqa: SLF001
        return sum(own.values()), sum(fate.grad_bytes for fate in self.fates.values())

    def state_bytes(self, of: set[str] | None = None) -> int:
        """Return what optimizers hold for parameters.

        Args:
            of: Names; None for all.

        Returns:
            Bytes.
        """
        count = 0
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                fate = self.fates.get(parameter) if isinstance(parameter, Tensor) else None
                if of is None or (fate is not None and fate.name in of):
                    tensors = [value for value in state.values() if isinstance(value, Tensor)]
                    count += sum(_local(value).numel() * value.element_size() for value in tensors)
        return count


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Return two numbers that another content would change: sums over its bits, plain and by place.

    Args:
        tensor: Of any type; waits for its device.

    Returns:
        Both sums.
    """
    plain = _local(tensor.detach())
    if plain.numel() and not plain.untyped_storage().nbytes():
        return 0, 0  # its memory is given back for a while
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
    """The part of a sharded tensor that this process holds."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = to_local() if to_local is not None else tensor
    return local.data if isinstance(local, nn.Parameter) else local


def _numbers(grad: Tensor) -> Tensor:
    """What of a gradient takes memory here: the entries of a sparse one, this process' part of a sharded one."""
    local = _local(grad)
    return local._values() if local.layout is torch.sparse_coo else local  # noqa: SLF001 - values() asks for a coalesced one
