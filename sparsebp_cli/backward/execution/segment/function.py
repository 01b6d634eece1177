"""The autograd Function of one segment: it ran without a graph, and its backward runs it again with one."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.execution.segment.recorded_forward import RecordedForward
from sparsebp_cli.backward.observe.internals import without_hooks
from sparsebp_cli.backward.observe.leaves import find_leaves
from sparsebp_cli.errors import UnsupportedError


class SegmentWork:
    """Everything except tensors that the backward of one segment needs.

    ``places`` are the indices of output leaves that can get a gradient. ``num_given`` counts tensors from outside.
    ``checked`` collects segments, by their last layer, that use only their own tensors.
    """

    recorded: RecordedForward
    places: tuple[int, ...]
    num_given: int

    def __init__(self, recorded: RecordedForward, places: tuple[int, ...], num_given: int, checked: set[str]) -> None:
        self.recorded, self.places, self.num_given, self._checked = recorded, places, num_given, checked

    def run_again(self, given: list[Tensor], grads: tuple[Tensor | None, ...]) -> list[tuple[Tensor, Tensor]]:
        """Run the segment with a graph on ``given`` instead of the tensors from outside.

        Returns the outputs that have a graph, each with its gradient.
        """
        with torch.enable_grad():
            leaves = self.recorded.run_again(given)
        outputs = [leaves[place] for place in self.places]
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        self._check_leaves(given, [output for output, _ in pairs])
        return pairs

    def _check_leaves(self, given: list[Tensor], outputs: list[Tensor]) -> None:
        first, last = self.recorded.names[0], self.recorded.names[-1]
        if last in self._checked:
            return
        own = {id(t) for t in (*given, *self.recorded.parameters)}
        for leaf in find_leaves(outputs):
            if id(leaf) not in own:  # its gradient would be lost
                raise UnsupportedError(
                    f"segments: a layer of {first!r} to {last!r} uses a tensor of shape {tuple(leaf.shape)} that "
                    "requires grad and is neither a parameter nor an argument of the layer: pass it as an argument"
                )
        self._checked.add(last)


@final
class SegmentFunction(Function):
    """A segment that has run already. Its backward runs it again."""

    @staticmethod
    def forward(ctx: Any, work: SegmentWork, outputs: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.work = work
        ctx.save_for_backward(*tensors[: work.num_given])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        work, needs = ctx.work, ctx.needs_input_grad[2:]
        gradients: list[Tensor | None] = [None] * len(needs)
        given = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs, strict=False)]
        pairs = work.run_again(given, grads) if any(grad is not None for grad in grads) else []
        if pairs:
            outputs, arrived = zip(*pairs, strict=True)
            sources = [*given, *work.recorded.parameters]
            wanted = [number for number, need in enumerate(needs) if need]
            # Autograd runs the parameters' hooks on the sum that arrives from here, so they must not run here as well.
            with without_hooks(work.recorded.parameters):
                found = torch.autograd.grad(outputs, [sources[n] for n in wanted], arrived, allow_unused=True)
            for number, gradient in zip(wanted, found, strict=True):
                gradients[number] = gradient
        return None, None, *gradients
