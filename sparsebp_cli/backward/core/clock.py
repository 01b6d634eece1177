"""Numbering of optimizer steps, micro-batches and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Step


class Clock:
    """Counts optimizer steps, and backward passes within them.

    Without an optimizer every backward advances the step. ``num_steps`` is the length of the training, if known. The
    clock calls ``on_end`` at the end of each step, and ``on_advance`` before the computation of the next.
    ``num_draws`` counts the random generators that decisions have requested.
    """

    index: int
    micro_batch: int
    draw: int
    num_draws: int

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        seed: int,
        num_steps: int | None,
        on_advance: Callable[[Step], None],
        on_end: Callable[[Step], None],
    ) -> None:
        self.index = self.micro_batch = self.draw = self.num_draws = 0
        self._seed, self._num_steps, self._on_advance, self._on_end = seed, num_steps, on_advance, on_end
        self._hook = None
        if optimizer is not None:
            self._hook = bare_optimizer(optimizer).register_step_post_hook(self._advance)

    @property
    def follows_optimizer(self) -> bool:
        """Whether an optimizer's steps advance the step; otherwise every backward does."""
        return self._hook is not None

    def now(self) -> Step:
        """Return the step of the backward under way, or of the next one."""
        return Step(
            self.index,
            self.micro_batch,
            seed=self._seed,
            draw=self.draw,
            rank=_current_rank(),
            num_steps=self._num_steps,
            on_draw=self._count_draw,
        )

    def count_backward(self) -> None:
        """Count a finished backward pass."""
        self.micro_batch += 1
        if self._hook is None:
            self._advance()

    def go_to(self, index: int, micro_batch: int) -> None:
        """Set the step and micro-batch, as after a resume."""
        self.index, self.micro_batch = index, micro_batch
        self._on_advance(self.now())

    @contextmanager
    def probing(self, draw: int) -> Iterator[None]:
        """Use ``draw`` for random policies inside the block; restore step, micro-batch and draw afterwards."""
        before = self.index, self.micro_batch, self.draw
        self.draw = draw
        try:
            yield
        finally:
            self.index, self.micro_batch, self.draw = before

    def stop(self) -> None:
        """Remove the hook on the optimizer."""
        if self._hook is not None:
            self._hook.remove()

    def _count_draw(self) -> None:
        self.num_draws += 1

    def _advance(self, optimizer: object = None, *_: object) -> None:
        # A scaler calls the step of a fused optimizer even if it drops the step, and tells it so.
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None and float(found_inf):
            return
        self._on_end(self.now())
        self.go_to(self.index + 1, 0)


def _current_rank() -> int:
    """Return this process's rank in its process group; 0 for a single process."""
    # A build without torch.distributed has only is_available.
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper, whose steps do nothing while accumulating."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return inner
