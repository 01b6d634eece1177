"""Check the batches of a script's first optimizer step: does any example influence another's outputs or weight?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsebp_audit.isolation import LossReader, ScriptCall, judge_batch
from sparsebp_audit.isolation.boundaries import find_examples
from sparsebp_audit.isolation.channel import Forward, tensors_of
from sparsebp_audit.report import BatchJudgement, IsolationReport
from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.isolation import Examples, NotAlone
from sparsebp_cli.backward.isolation.output import named_tensors
from sparsebp_cli.backward.observe.internals import next_sequence_number

MOST_CALLS = 64  # calls in a step; only the first ones of a longer step are judged
ORDER = ("logits", "log_probs")


class Referee:
    """Judge the calls of models until the first optimizer step has ended."""

    is_over: bool

    def __init__(self) -> None:
        self.is_over = False
        self._batches: list[BatchJudgement] = []
        self._loss = LossReader()
        self._examples: Examples | None = None  # of the running call
        self._begin = 0  # number of the first node of its graph

    def before_call(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Judge a batch that a script passes to a model, before the model runs."""
        self._examples = None
        if self.is_over or len(self._batches) >= MOST_CALLS:
            return
        inputs = bind_arguments(unwrapped(model), args, kwargs)
        self._batches.append(judge_batch(model, inputs))
        try:
            self._examples = find_examples(inputs, None)
        except NotAlone as error:
            self._loss.unread = str(error)
        self._begin = next_sequence_number()

    def after_call(self, output: object) -> None:
        """Store the outputs of a call, where the gradient of the script's loss is read later."""
        if self._examples is None or self.is_over:
            return
        tensors = {name: value for name, value in named_tensors(output).items() if value.requires_grad}
        wide = {name: value for name, value in tensors.items() if value.dim() > 1}
        name = next((name for name in (*ORDER, *wide) if name in wide), None)
        if name is None:
            self._loss.unread = (
                "the model returns a loss, but not the values per position from which it computed the loss"
            )
            return
        balancing = output.get("aux_loss") if isinstance(output, Mapping) else None
        made = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        number = len(self._loss.calls)
        forward = Forward(number, self._examples, self._begin, next_sequence_number(), made)
        forward.allowed = balancing if isinstance(balancing, Tensor) else None
        self._loss.calls.append(ScriptCall(number, self._examples, name, wide[name], forward))
        self._loss.recorder.follow(made)

    def before_backward(self, losses: Sequence[object], gradients: object) -> None:
        """Read a loss before its backward pass."""
        tensors = [loss for loss in losses if isinstance(loss, Tensor)]
        if self.is_over or len(tensors) != len(losses):
            return
        given = list(gradients) if isinstance(gradients, Sequence) else [None] * len(tensors)
        self._loss.read(tensors, given)

    def end_step(self) -> None:
        """End with the first optimizer step."""
        self.is_over, self._examples = True, None
        self._loss.recorder.clear()
        for call in self._loss.calls:
            call.release()

    def start(self) -> None:
        """Prepare to record the functions that a script applies to outputs."""
        torch.overrides._push_mode(self._loss.recorder)  # noqa: SLF001 - it ends in another call, unlike a block

    def stop(self) -> None:
        """Stop recording functions; below another library's mode, ours stays without effect."""
        self._loss.recorder.clear()
        modes = torch.overrides._get_current_function_mode_stack()  # noqa: SLF001 - no public name
        if modes and modes[-1] is self._loss.recorder:
            torch.overrides._pop_mode()  # noqa: SLF001

    def report(self) -> IsolationReport:
        """Return what was found."""
        return IsolationReport(tuple(self._batches), self._loss.judge(), self._loss.unread)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of wrappers, whose forward has the argument names."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        inner = next(model.children(), None)
        if inner is None:
            break
        model = inner
    return model
