"""The dropout of a branch, drawn again for some of its rows.

A branch that is computed again in the backward needs the masks of its forward, and for the kept rows only. So the
forward notes the random generator's state at every dropout, and the second time the whole mask is drawn from that
state, and the rows taken out of it. The global generators are left as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.bound import Bound


@dataclass(frozen=True)
class Draw:
    """One call of a dropout: where the generator stood, and what was asked for."""

    state: Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass
class Tape:
    """The draws of one forward of a branch, by module.

    Args:
        draws: In the order of the calls of each module.
    """

    draws: dict[nn.Module, list[Draw]] = field(default_factory=lambda: defaultdict(list))


class DropoutRecorder:
    """The dropouts of one branch: idle, or recording, or replaying a tape.

    Args:
        *root: Modules of the branch.
    """

    def __init__(self, *root: nn.Module) -> None:
        self.modules = [m for part in root for m in part.modules() if type(m) is nn.Dropout]
        self.tape: Tape | None = None
        self.index_K: Tensor | None = None
        self._taken: dict[nn.Module, int] | None = None  # when replaying

    def install(self) -> None:
        """Cover the modules."""
        for module in self.modules:
            module.__dict__["forward"] = BoundDropout(module, self)

    def remove(self) -> None:
        """Uncover them."""
        for module in self.modules:
            module.__dict__.pop("forward", None)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Note every draw.

        Yields:
            Tape: It fills while the block runs.
        """
        self.tape, self._taken = Tape(), None
        try:
            yield self.tape
        finally:
            self.tape = None

    @contextmanager
    def replaying(self, tape: Tape, index_K: Tensor | None) -> Iterator[None]:
        """Repeat the draws of a tape.

        Args:
            tape: Of the forward.
            index_K: Rows that the modules are now called with; None: all of them.

        Yields:
            None: As long as the branch is computed again.
        """
        self.tape, self.index_K, self._taken = tape, index_K, {}
        try:
            yield
        finally:
            self.tape = self.index_K = self._taken = None

    def run(self, module: nn.Dropout, x: Tensor) -> Tensor:
        """Drop out, as the module does.

        Args:
            module: The dropout.
            x: Its input.

        Returns:
            Its output.
        """
        if self.tape is None or not module.training or module.p == 0.0:
            return nn.functional.dropout(x, module.p, module.training, module.inplace)
        if self._taken is None:
            self.tape.draws[module].append(Draw(_get_state(x.device), x.shape, x.dtype, x.device))
            return nn.functional.dropout(x, module.p)
        number = self._taken[module] = self._taken.get(module, -1) + 1
        mask = _draw_again(self.tape.draws[module][number], module.p)
        if self.index_K is not None:
            mask = mask.view(-1, mask.shape[-1]).index_select(0, self.index_K)
        return x * mask.view(x.shape)


class BoundDropout(Bound):
    """The ``forward`` of one dropout module."""

    def __init__(self, module: nn.Dropout, recorder: DropoutRecorder) -> None:
        self.module, self.recorder = module, recorder

    def __call__(self, x: Tensor) -> Tensor:
        return self.recorder.run(self.module, x)


def _get_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(state: Tensor, device: torch.device) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def _draw_again(draw: Draw, p: float) -> Tensor:
    before = _get_state(draw.device)
    try:
        _set_state(draw.state, draw.device)
        return nn.functional.dropout(torch.ones(draw.shape, dtype=draw.dtype, device=draw.device), p)
    finally:
        _set_state(before, draw.device)


@contextmanager
def generators_at(states: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Run with the global generators as they were once, and put them back.

    Args:
        states: From :func:`capture_generators`.
        device: The device that computes.

    Yields:
        None: As long as they are there.
    """
    before = capture_generators(device)
    try:
        _put(states, device)
        yield
    finally:
        _put(before, device)


def capture_generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of the CPU's generator, and of the device's where it has one of its own."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _put(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
