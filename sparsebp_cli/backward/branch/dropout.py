"""Dropout of a branch, redrawn in the backward for some of its rows.

Recomputing a branch needs the dropout masks of its forward, restricted to the kept rows. The forward records the
random generator's state at every dropout; the recomputation draws the whole mask from that state again and selects the
rows. The global generators are restored afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches
from sparsebp_cli.backward.patch.rng import get_state, set_state


@dataclass(frozen=True)
class Draw:
    """One dropout call: the generator's state before it, and the mask's shape, dtype and device."""

    state: Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass
class DropoutTape:
    """The draws of one forward of a branch, by module, in the order of its calls."""

    draws: dict[nn.Module, list[Draw]] = field(default_factory=lambda: defaultdict(list))


class DropoutRecorder:
    """The dropouts of one branch: idle, recording, or replaying a tape."""

    modules: list[nn.Dropout]

    def __init__(self, *root: nn.Module) -> None:
        self.modules = [m for part in root for m in part.modules() if type(m) is nn.Dropout]
        self.tape: DropoutTape | None = None
        self.index_K: Tensor | None = None
        self._taken: dict[nn.Module, int] | None = None  # when replaying

    def install(self, patches: ForwardPatches) -> None:
        """Override the forward of each dropout."""
        for module in self.modules:
            patches.install(module, DropoutOverride(module, self))

    @contextmanager
    def recording(self) -> Iterator[DropoutTape]:
        """Record every draw of the block on the tape that is yielded."""
        self.tape, self._taken = DropoutTape(), None
        try:
            yield self.tape
        finally:
            self.tape = None

    @contextmanager
    def replaying(self, tape: DropoutTape, index_K: Tensor | None) -> Iterator[None]:
        """Repeat the draws of a tape; the modules are called with the rows ``index_K``, or with all if that is None."""
        self.tape, self.index_K, self._taken = tape, index_K, {}
        try:
            yield
        finally:
            self.tape = self.index_K = self._taken = None

    def run(self, module: nn.Dropout, x: Tensor) -> Tensor:
        """Apply dropout as the module does, and record or replay its mask."""
        if self.tape is None or not module.training or module.p == 0.0:
            return nn.functional.dropout(x, module.p, module.training, module.inplace)
        if self._taken is None:
            self.tape.draws[module].append(Draw(get_state(x.device), x.shape, x.dtype, x.device))
            return nn.functional.dropout(x, module.p)
        number = self._taken[module] = self._taken.get(module, -1) + 1
        mask = _draw_again(self.tape.draws[module][number], module.p)
        if self.index_K is not None:
            mask = mask.view(-1, mask.shape[-1]).index_select(0, self.index_K)
        return x * mask.view(x.shape)


class DropoutOverride(ForwardOverride):
    """The ``forward`` of one dropout module."""

    module: nn.Dropout
    recorder: DropoutRecorder

    def __init__(self, module: nn.Dropout, recorder: DropoutRecorder) -> None:
        self.module, self.recorder = module, recorder

    def __call__(self, x: Tensor) -> Tensor:
        return self.recorder.run(self.module, x)


def _draw_again(draw: Draw, p: float) -> Tensor:
    before = get_state(draw.device)
    try:
        set_state(draw.state, draw.device)
        # Dropout of ones draws as the forward did, and has the factor 1 / (1 - p) in it.
        return nn.functional.dropout(torch.ones(draw.shape, dtype=draw.dtype, device=draw.device), p)
    finally:
        set_state(before, draw.device)
