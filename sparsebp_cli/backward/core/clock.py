"""Which step, micro-batch and draw a decision belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparsebp_cli.backward.core.process import current_rank
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Step


class Clock:
    """Counts optimizer steps, and backward passes within them.

    Args:
        optimizer: Its steps advance the step number; None: every backward does.
        seed: Of random decisions.
        num_steps: Optimizer steps of the whole training, where that is known.
        on_advance: Called with every new step, before anything of it is computed.

    Raises:
        UnsupportedError: ``optimizer`` is none of PyTorch's kind.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        seed: int,
        num_steps: int | None,
        on_advance: Callable[[Step], None],
    ) -> None:
        self.index = self.micro_batch = self.draw = 0
        self._seed, self._num_steps, self._on_advance = seed, num_steps, on_advance
        self._hook = None if optimizer is None else _register_step_hook(optimizer, self._advance)

    def now(self) -> Step:
        """Return the step of the backward under way, or of the next one."""
        return Step(
            self.index,
            self.micro_batch,
            seed=self._seed,
            draw=self.draw,
            rank=current_rank(),
            num_steps=self._num_steps,
        )

    def count_backward(self) -> None:
        """Go on after a backward pass."""
        self.micro_batch += 1
        if self._hook is None:
            self._advance()

    def go_to(self, index: int, micro_batch: int) -> None:
        """Be at a step, as after a resume."""
        self.index, self.micro_batch = index, micro_batch
        self._on_advance(self.now())

    @contextmanager
    def aside(self, draw: int) -> Iterator[None]:
        """Let time pass for a probe alone: afterwards it is as late as before.

        Args:
            draw: Of random policies, while it lasts.

        Yields:
            None: As long as it lasts.
        """
        before = self.index, self.micro_batch, self.draw
        self.draw = draw
        try:
            yield
        finally:
            self.index, self.micro_batch, self.draw = before

    def stop(self) -> None:
        """Listen to the optimizer no more."""
        if self._hook is not None:
            self._hook.remove()

    def _advance(self, *_: object) -> None:
        self.go_to(self.index + 1, 0)


def _register_step_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it, and skips it while accumulating
    if not isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return inner.register_step_post_hook(hook)
