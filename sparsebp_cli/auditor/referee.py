"""Judges the batches of a script's first optimizer step: is each example computed, and weighed, as if it were alone?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sparsebp_cli.audit_report import BatchJudgement, IsolationReport
from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.isolation import Examples, LossReader, NotAlone, ScriptCall, find_examples, judge_batch
from sparsebp_cli.backward.isolation.output import named_tensors

MOST_CALLS = 64  # of a step: a step of more micro-batches is judged by its first
ORDER = ("logits", "log_probs")


class Referee:
    """Judges the calls of models until the first optimizer step has ended."""

    is_over: bool

    def __init__(self) -> None:
        self.is_over = False
        self._batches: list[BatchJudgement] = []
        self._loss = LossReader()
        self._examples: Examples | None = None  # of the running call

    def before_call(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Judge a batch that a script gives to a model, before the model runs."""
        self._examples = None
        if self.is_over or len(self._batches) >= MOST_CALLS:
            return
        inputs = bind_arguments(unwrapped(model), args, kwargs)
        self._batches.append(judge_batch(model, inputs))
        try:
            self._examples = find_examples(inputs, None)
        except NotAlone:
            return

    def after_call(self, output: object) -> None:
        """Remember the outputs of a call, to read the gradient of the script's loss there."""
        if self._examples is None or self.is_over:
            return
        tensors = {name: value for name, value in named_tensors(output).items() if value.requires_grad}
        wide = {name: value for name, value in tensors.items() if value.dim() > 1}
        name = next((name for name in (*ORDER, *wide) if name in wide), None)
        if name is None:
            self._loss.unread = "the model's output has a loss, and no values of single positions that it was made of"
            return
        balancing = output.get("aux_loss") if isinstance(output, Mapping) else None
        balancing = balancing if isinstance(balancing, Tensor) else None
        number = len(self._loss.calls)
        self._loss.calls.append(ScriptCall(number, self._examples, name, wide[name], balancing))

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
        for call in self._loss.calls:
            call.output = call.balancing = None

    def report(self) -> IsolationReport:
        """Return what was found."""
        return IsolationReport(tuple(self._batches), self._loss.judge(), self._loss.unread)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module whose forward has the names of the arguments, inside of wrappers."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        inner = next(model.children(), None)
        if inner is None:
            break
        model = inner
    return model
