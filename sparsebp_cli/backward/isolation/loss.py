"""What a script's own loss does to the examples of its batches, read where its gradient arrives at a model's outputs.

A loss that is a weighted sum of cross-entropies gives the logits of a row w (p - y), with the probabilities p, one-hot
labels y and the row's weight w, all of which can be read from the gradient and the logits. Any other loss is asked by
its second derivative whether the gradient of one example's outputs depends on another example's outputs.

Shape letters: B rows, T positions, N rows (B*T), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsebp_cli.audit_report.isolation import LossJudgement
from sparsebp_cli.backward.isolation.examples import Examples

SAME = 0.02  # relative difference of weights that counts as none; bfloat16 has 8 bits
NEXT_TOKEN = 0.9  # share of labels that are the next token, above which a head is one that predicts it
PER_TOKEN = "log_probs"  # outputs by this name have been taken at the label already
TO_DIVIDE = (
    "divide by the labels of the whole step: num_items_in_batch of transformers' Trainer, or the sum of all "
    "micro-batches' losses over the number of their labels"
)


@dataclass
class ScriptCall:
    """One call of a model by a script, and what its loss did to it."""

    number: int
    examples: Examples
    name: str  # of the output
    output: Tensor | None  # until its gradient was read
    balancing: Tensor | None = None  # the loss that balances experts, which reads all tokens
    weights: list[Tensor] = field(default_factory=list)  # of the trained rows of each example
    crossing: int = 0
    labels: int = 0


class LossReader:
    """Reads the loss of a step from its backward passes."""

    unread: str

    def __init__(self) -> None:
        self.calls: list[ScriptCall] = []
        self.unread = ""
        self._purposes: list[str] = []

    def read(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Read a backward pass before it runs; ``gradients``: of its losses, None for 1."""
        waiting = [call for call in self.calls if call.output is not None]
        if not waiting:
            return
        try:
            self._read(losses, gradients, waiting)
        except Exception as error:  # the training must go on
            line = (str(error).strip().splitlines() or [""])[0]
            self.unread = f"{type(error).__name__}: {line}"[:200]

    def judge(self) -> tuple[LossJudgement, ...]:
        """Return what was found in all passes of the step."""
        found = [LossJudgement("purpose", text) for text in dict.fromkeys(self._purposes)]
        crossing, labels = sum(call.crossing for call in self.calls), sum(call.labels for call in self.calls)
        if crossing:
            found.append(
                LossJudgement(
                    "crossing",
                    f"{crossing} of {labels} labels are first tokens of an example, predicted from the last position "
                    "of the one before",
                    "set the label of each example's first token to -100 in rows of several examples",
                )
            )
        uneven = _find_uneven([call for call in self.calls if call.weights])
        return (*found, *([uneven] if uneven is not None else []))

    def _read(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None], waiting: list[ScriptCall]) -> None:
        given = [torch.ones_like(x) if g is None else g for x, g in zip(losses, gradients, strict=True)]
        outputs = [call.output for call in waiting if call.output is not None]
        # The graph is kept: the script's own pass comes after this one.
        firsts = torch.autograd.grad(list(losses), outputs, given, retain_graph=True, allow_unused=True)
        reached, others = [], list[ScriptCall]()
        for call, grad in zip(waiting, firsts, strict=True):
            if grad is None:
                continue
            reached.append(call)
            if not self._read_weights(call, grad):
                others.append(call)
        if others:
            self._read_purpose(losses, given, others)
        for call in reached:
            if call.balancing is not None and call.balancing.requires_grad:
                (grad,) = torch.autograd.grad(
                    list(losses), [call.balancing], given, retain_graph=True, allow_unused=True
                )
                if grad is not None and bool(grad.ne(0).any()):
                    self._purposes.append("the loss that balances experts (aux_loss) reads all tokens, on purpose")
            call.output = call.balancing = None

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
        for part in rows.split(1024):  # probabilities of all rows at once could be the largest tensor of the step
            got_KV, probability_KV = grad_NV[part].float(), logits_NV[part].float().softmax(-1)
            # Of p - y, the entry of the label is as large as all others together.
            label_K = got_KV.abs().argmax(dim=1)
            at = (torch.arange(len(part), device=part.device), label_K)
            # Where the model is sure, p - 1 is 0.
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

    def _read_purpose(self, losses: Sequence[Tensor], given: list[Tensor], calls: list[ScriptCall]) -> None:
        """Note if the gradient of one example's outputs depends on another's."""
        outputs = [call.output for call in calls if call.output is not None]
        grads = torch.autograd.grad(list(losses), outputs, given, create_graph=True, allow_unused=True)
        owners = [_owners(call, output) for call, output in zip(calls, outputs, strict=True)]
        first, count = list[int](), 0
        for call in calls:
            first.append(count)
            count += len(call.examples.found)
        generator = torch.Generator().manual_seed(0)
        for bit in range(max(1, (count - 1).bit_length())):  # each two numbers differ in one bit
            total = None
            for grad, owner, start in zip(grads, owners, first, strict=True):
                if grad is None or not grad.requires_grad:
                    continue
                chosen = ((owner + start) >> bit & 1).bool() & (owner >= 0)
                random = torch.randn(grad.shape, generator=generator).to(grad)
                term = (grad * random * _wide(chosen, grad)).sum()
                total = term if total is None else total + term
            if total is None or not total.requires_grad:
                return  # linear: nothing of another example is in it
            seconds = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
            inside = outside = 0.0
            for second, owner, start in zip(seconds, owners, first, strict=True):
                if second is None:
                    continue
                chosen = _wide(((owner + start) >> bit & 1).bool() & (owner >= 0), second)
                inside += float((second * chosen).double().square().sum())
                outside += float((second * ~chosen).double().square().sum())
            if outside > (1e-4**2) * max(inside, 1e-30) and outside > 0:
                self._purposes.append(
                    "it compares examples with each other, on purpose, as in-batch negatives and preference pairs do"
                )
                return


def _wide(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.view(*chosen.shape, *[1] * (like.dim() - chosen.dim())).to(like.device)


def _owners(call: ScriptCall, output: Tensor) -> Tensor:
    """Return the number of the example of each row, or of each position where the output has positions; -1: none."""
    size = call.examples.size
    if output.dim() > 1 and output.shape[:2] == size:
        owner = torch.full(size, -1)
        for number, example in enumerate(call.examples.found):
            owner[example.row, example.columns] = number
        return owner
    owner = torch.full(output.shape[:1], -1)
    for number, example in enumerate(call.examples.found):
        if example.row < len(owner):
            owner[example.row] = number
    return owner


def _count_crossing(examples: Examples, label_BT: Tensor) -> int:
    """Return how many labels of a head that predicts the next token are of another example than their position."""
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
    """Say so if all tokens of a call weigh the same, and those of another call more or less."""
    means, counts = [], []
    for call in calls:
        weight = torch.cat([weights.flatten().double().cpu() for weights in call.weights])
        if not len(weight):
            continue
        mean = float(weight.mean())
        if not mean or float((weight - mean).abs().max()) > SAME * abs(mean):
            return None  # the loss weighs tokens or examples by itself
        means.append(mean)
        counts.append(len(weight))
    if len(means) < 2 or min(means) <= 0 or max(means) <= (1 + SAME) * min(means):
        return None
    high, low = means.index(max(means)), means.index(min(means))
    return LossJudgement(
        "uneven",
        f"a token of micro-batch {high + 1} weighs {means[high] / means[low]:.2f} times one of micro-batch {low + 1}: "
        f"each is averaged over its own labels ({counts[high]} and {counts[low]})",
        TO_DIVIDE,
    )
