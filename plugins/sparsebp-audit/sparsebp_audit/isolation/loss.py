"""Analyse how a script's loss treats the examples of its batches, from its gradient at a model's outputs.

A loss that is a weighted sum of cross-entropies gives the logits of a row the gradient w (p - y), with the
probabilities p, one-hot labels y and the row's weight w. All of these can be read from the gradient and the logits. For
any other loss, its second derivative shows whether the gradient of one example's outputs depends on another example's
outputs. The loss also runs again with changed outputs, to find effects that the script has detached. All paths from the
model to the loss are checked.

Shape letters: B rows, T positions, N rows (B*T), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsebp_audit.isolation.channel import Channel, Forward, find_channels
from sparsebp_audit.isolation.replay import LossRecorder
from sparsebp_audit.report.isolation import LossJudgement
from sparsebp_cli.backward.isolation.examples import Examples

SAME = 0.02  # relative difference of weights that counts as none; bfloat16 has 8 bits
NEXT_TOKEN = 0.9  # fraction of labels that are the next token, above which a head counts as predicting it
PER_TOKEN = "log_probs"  # outputs of this name are already taken at the label
TO_DIVIDE = (
    "divide the loss by the number of labels of the whole step: use num_items_in_batch of transformers' Trainer, or "
    "sum the loss over the labels of all micro-batches, and divide by their number"
)


@dataclass
class ScriptCall:
    """One call of a model by a script, and what its loss did to it."""

    number: int
    examples: Examples
    name: str  # name of the output
    output: Tensor | None  # None after its gradient was read
    forward: Forward  # with the load-balancing loss of experts, which may read all tokens
    weights: list[Tensor] = field(default_factory=list)  # of the trained rows of each example
    crossing: int = 0
    labels: int = 0

    def release(self) -> None:
        """Release all tensors of the graph."""
        self.output = self.forward.allowed = None
        self.forward.outputs = []


class LossReader:
    """Read the loss of a step from its backward passes."""

    unread: str
    recorder: LossRecorder

    def __init__(self) -> None:
        self.calls: list[ScriptCall] = []
        self.recorder = LossRecorder()
        self.unread = ""
        self._purposes: list[str] = []

    def read(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Read a backward pass before it runs; ``gradients`` are those of its losses, None for 1."""
        waiting = [call for call in self.calls if call.output is not None]
        if not waiting:
            return
        try:
            self._read(losses, gradients, waiting)
        except Exception as error:  # the training must continue
            line = (str(error).strip().splitlines() or [""])[0]
            self.unread = f"{type(error).__name__}: {line}"[:200]

    def judge(self) -> tuple[LossJudgement, ...]:
        """Return the findings about all passes of the step."""
        found = [LossJudgement("purpose", text) for text in dict.fromkeys(self._purposes)]
        crossing, labels = sum(call.crossing for call in self.calls), sum(call.labels for call in self.calls)
        if crossing:
            found.append(
                LossJudgement(
                    "crossing",
                    f"{crossing} of {labels} labels are first tokens of an example, which the model predicts from the "
                    "last position of the previous example",
                    "in rows with several examples, set the label of each example's first token to -100",
                )
            )
        uneven = _find_uneven([call for call in self.calls if call.weights])
        return (*found, *([uneven] if uneven is not None else []))

    def _read(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None], waiting: list[ScriptCall]) -> None:
        given = [torch.ones_like(x) if g is None else g for x, g in zip(losses, gradients, strict=True)]
        channels, is_bypassed = find_channels(losses, [call.forward for call in waiting])
        reached = [call for call in waiting if any(channel.call == call.number for channel in channels)]
        if is_bypassed:
            self.unread = (
                "it reads parameters of the model directly, not only the model's outputs, as fused losses and losses "
                "inside of the model do"
            )
        others = [call for call in reached if not self._is_sum(call, losses, given, channels)]
        if not (others and self._compares(losses, given, others, channels)):
            self._read_coupling(losses, given, reached)
        for call in reached:
            allowed = call.forward.allowed
            if allowed is not None and allowed.requires_grad:
                (grad,) = torch.autograd.grad(list(losses), [allowed], given, retain_graph=True, allow_unused=True)
                if grad is not None and bool(grad.ne(0).any()):
                    self._purposes.append("the loss that balances experts (aux_loss) reads all tokens, on purpose")
            call.release()
        self.recorder.clear()

    def _is_sum(self, call: ScriptCall, losses: Sequence[Tensor], given: list[Tensor], channels: list[Channel]) -> bool:
        """Record the weights of a sum of cross-entropies; return whether the loss reads nothing else of a call."""
        assert call.output is not None
        # Retain the graph, because the script's own pass comes after this one.
        (grad,) = torch.autograd.grad(list(losses), [call.output], given, retain_graph=True, allow_unused=True)
        is_sum = grad is not None and self._read_weights(call, grad)
        return is_sum and sum(channel.call == call.number for channel in channels) == 1

    def _read_weights(self, call: ScriptCall, grad: Tensor) -> bool:
        """Record the weights of a sum of cross-entropies; return whether the loss is one."""
        output, size = call.output, call.examples.size
        assert output is not None
        if call.name == PER_TOKEN:
            if output.dim() == 2:
                call.weights = [-row[row != 0] for row in grad]
                call.labels = int((grad != 0).sum())
            return False
        if output.dim() != 3 or output.shape[:2] != size:
            return False
        logits_NV, grad_NV = output.detach().flatten(0, 1), grad.flatten(0, 1)
        rows = grad_NV.ne(0).any(dim=1).nonzero()[:, 0]
        weight_N = torch.zeros(len(grad_NV), device=grad.device)
        label_N = torch.full((len(grad_NV),), -1, device=grad.device)
        for part in rows.split(1024):  # probabilities of all rows at once could be the step's largest tensor
            got_KV, probability_KV = grad_NV[part].float(), logits_NV[part].float().softmax(-1)
            # In p - y, the label's entry is as large as all others together.
            label_K = got_KV.abs().argmax(dim=1)
            at = (torch.arange(len(part), device=part.device), label_K)
            # If the model is sure, p - 1 is 0.
            weight_K = got_KV[at] / (probability_KV[at] - 1).clamp(max=-1e-6)
            probability_KV[at] -= 1
            residual = (got_KV - weight_K[:, None] * probability_KV).norm()
            if float(residual) > SAME * float(got_KV.norm()):
                return False
            weight_N[part], label_N[part] = weight_K, label_K
        call.weights = [
            weight[weight != 0]
            for example in call.examples.found
            for weight in [weight_N.view(size)[example.row, example.columns.to(grad.device)]]
        ]
        call.labels = len(rows)
        call.crossing = _count_crossing(call.examples, label_N.view(size).cpu())
        return True

    def _compares(
        self, losses: Sequence[Tensor], given: list[Tensor], calls: list[ScriptCall], channels: list[Channel]
    ) -> bool:
        """Record whether the gradient of one example's outputs depends on another's, by its second derivative."""
        first, count = dict[int, int](), 0
        for call in calls:
            first[call.number] = count
            count += len(call.examples.found)
        read = [channel for channel in channels if channel.call in first]
        owners = [torch.where(c.owner < 0, c.owner, c.owner + first[c.call]) for c in read]
        if not self._depends(losses, given, read, owners, count):
            return False
        self._purposes.append(
            "it compares examples with each other on purpose, as losses with in-batch negatives or preference pairs do"
        )
        return True

    def _read_coupling(self, losses: Sequence[Tensor], given: list[Tensor], calls: list[ScriptCall]) -> None:
        """Record whether it does so through values that the script has detached."""
        found = self.recorder.find_coupling(losses, given, [call.forward for call in calls])
        if found:
            self._purposes.append(
                "an example's gradient depends on the outputs of other examples through values without a gradient, "
                "such as weights that are normalised over the batch"
            )
        elif found is None and not self.unread:
            self.unread = (
                "the audit cannot run the loss again on other outputs, so it cannot see whether the loss "
                "reads detached values of other examples"
            )

    def _depends(
        self,
        losses: Sequence[Tensor],
        given: list[Tensor],
        channels: list[Channel],
        owners: list[Tensor],
        count: int,
    ) -> bool:
        edges = [channel.edge for channel in channels]
        grads = torch.autograd.grad(list(losses), edges, given, create_graph=True, allow_unused=True)
        generator = torch.Generator().manual_seed(0)
        for bit in range(max(1, (count - 1).bit_length())):  # every two numbers differ in one bit
            total = None
            for grad, owner in zip(grads, owners, strict=True):
                if grad is None or not grad.requires_grad:
                    continue
                chosen = (owner >> bit & 1).bool() & (owner >= 0)
                random = torch.randn(grad.shape, generator=generator).to(grad)
                term = (grad * random * _wide(chosen, grad)).sum()
                total = term if total is None else total + term
            if total is None or not total.requires_grad:
                return False  # linear: no other example contributes
            seconds = torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
            inside = outside = 0.0
            for second, owner in zip(seconds, owners, strict=True):
                if second is None:
                    continue
                chosen = _wide((owner >> bit & 1).bool() & (owner >= 0), second)
                inside += float((second * chosen).double().square().sum())
                outside += float((second * ~chosen).double().square().sum())
            if outside > (1e-4**2) * max(inside, 1e-30) and outside > 0:
                return True
        return False


def _wide(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.view(*chosen.shape, *[1] * (like.dim() - chosen.dim())).to(like.device)


def _count_crossing(examples: Examples, label_BT: Tensor) -> int:
    """Return how many labels belong to another example than their position, for a head that predicts the next token."""
    ids = examples.inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.shape != label_BT.shape or not examples.several:
        return 0
    next_BT = label_BT[:, :-1]
    is_trained = next_BT >= 0
    matches = (next_BT == ids[:, 1:].cpu()) & is_trained
    if int(matches.sum()) < NEXT_TOKEN * int(is_trained.sum()):
        return 0
    ends = [(example.row, int(example.columns[-1])) for example in examples.found]
    return sum(column + 1 < label_BT.shape[1] and bool(matches[row, column]) for row, column in ends)


def _find_uneven(calls: list[ScriptCall]) -> LossJudgement | None:
    """Return a finding if all tokens within each call weigh the same, but tokens of different calls do not."""
    means, counts = [], []
    for call in calls:
        weight = torch.cat([weights.flatten().double().cpu() for weights in call.weights])
        if not len(weight):
            continue
        mean = float(weight.mean())
        if not mean or float((weight - mean).abs().max()) > SAME * abs(mean):
            return None  # the loss weighs tokens or examples itself
        means.append(mean)
        counts.append(len(weight))
    if len(means) < 2 or min(means) <= 0 or max(means) <= (1 + SAME) * min(means):
        return None
    high, low = means.index(max(means)), means.index(min(means))
    return LossJudgement(
        "uneven",
        f"a token of micro-batch {high + 1} weighs {means[high] / means[low]:.2f} times as much as one of micro-batch "
        f"{low + 1}: each micro-batch's loss is averaged over its own labels ({counts[high]} and {counts[low]})",
        TO_DIVIDE,
    )
