"""Report whether examples of a step influence each other's gradients, as numbers and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["alone", "mixed", "purpose", "unjudged"]


@dataclass(frozen=True)
class MixedPair:
    """An example whose outputs read another example.

    Args:
        source: The example that is read, counted from 0 over the batch.
        target: The example whose outputs read it.
        share: Gradient of the target's outputs for the source's embeddings over that for its own, 2-norms; above 0.
    """

    source: int
    target: int
    share: float


@dataclass(frozen=True)
class BatchJudgement:
    """The isolation check of one batch: the outputs of its examples compared with those of the examples alone.

    Args:
        model: Class of the model that was called.
        verdict: ``alone``: each example's outputs and gradient are those of the example alone. ``mixed``: they are not.
            ``purpose``: they are not, because a part mixes examples by definition. ``unjudged``: see ``reason``.
        examples: Number of examples in the batch; 0 if it was not judged.
        rows: Number of rows of the batch; an example may be a row or a part of one.
        positions: Number of positions of the batch, rows times length, padding included.
        told_by: The argument that defines where examples begin and end.
        reason: Why it was not judged, or which part mixes by definition; empty otherwise.
        difference: Largest relative difference, by 2-norm, of an example's outputs in the batch and alone.
        difference_limit: Largest ``difference`` that rounding explains.
        leak: Largest relative contribution, by 2-norm, of another example to the gradient for one example's embeddings.
        leak_limit: Largest ``leak`` that rounding explains.
        affected: The examples whose outputs differ, largest difference first, counted from 0.
        differences: Relative difference of each affected example, in the order of ``affected``.
        pairs: Examples that read others, with the share, for the most affected ones; empty if none does.
        module: The first module whose output for an example differs from the example alone; empty if none was found.
        module_class: Class of ``module``; empty if none was found.
        cause: The property of the batch that causes it, in one sentence.
        mend: A change that would fix it, in one sentence.
        is_mend_tried: Whether the mend was tried on this batch and isolated its examples.
        cost_steps: Work of the check in plain steps of this batch, by positions: a forward is a third of one.
    """

    model: str
    verdict: Verdict
    examples: int = 0
    rows: int = 0
    positions: int = 0
    told_by: str = ""
    reason: str = ""
    difference: float = 0.0
    difference_limit: float = 0.0
    leak: float = 0.0
    leak_limit: float = 0.0
    affected: tuple[int, ...] = ()
    differences: tuple[float, ...] = ()
    pairs: tuple[MixedPair, ...] = ()
    module: str = ""
    module_class: str = ""
    cause: str = ""
    mend: str = ""
    is_mend_tried: bool = False
    cost_steps: float = 0.0

    def lines(self) -> list[str]:
        """Return sentences without a full stop, the headline first."""
        size = (
            f"{self.model}, {self.examples} example{'s' * (self.examples != 1)} in {self.rows} "
            f"row{'s' * (self.rows != 1)}"
        )
        if self.verdict == "unjudged":
            return [f"{self.model}: not judged: {self.reason}"]
        if self.verdict == "alone":
            return [f"{size}: each as if alone (difference: outputs {self.difference:.0e}, gradient {self.leak:.0e})"]
        if self.verdict == "purpose":
            return [f"{size}: mixed on purpose by {self.reason} (outputs differ by {self.difference:.1e})"]
        worst = f"outputs of {self._named()} differ by up to {self.difference:.1%} from outputs computed alone"
        found = [f"{size}: NOT as if alone: {worst}"]
        if self.pairs:
            read = ", ".join(f"{pair.target + 1} reads {pair.source + 1} ({pair.share:.1%})" for pair in self.pairs[:6])
            more = f" and {len(self.pairs) - 6} more" if len(self.pairs) > 6 else ""
            found.append(f"which example reads which: {read}{more}, by the gradient for embeddings")
        else:
            found.append("no example reads another, but the model computes an example differently when it is alone")
        if self.module:
            found.append(f"first at: {self.module} ({self.module_class})")
        if self.cause:
            found.append(f"by: {self.cause}")
        if self.mend:
            found.append(f"to do: {self.mend}{' (tried on this batch: it works)' if self.is_mend_tried else ''}")
        return found

    def _named(self) -> str:
        numbers = [str(number + 1) for number in sorted(self.affected)]
        if len(numbers) == 1:
            return f"example {numbers[0]}"
        more = f" and {len(numbers) - 6} more" if len(numbers) > 6 else ""
        return f"examples {', '.join(numbers[:6])}{more}"


@dataclass(frozen=True)
class LossJudgement:
    """What the loss of one step does to its examples, read from its gradient at the model's outputs.

    Args:
        kind: ``crossing``: a label is predicted from another example. ``uneven``: tokens of one micro-batch weigh more
            than those of another. ``purpose``: the loss reads several examples by definition.
        detail: Observation, in one sentence.
        advice: Remedy, in one sentence; empty if it is by definition.
    """

    kind: Literal["crossing", "uneven", "purpose"]
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class IsolationReport:
    """Whether, in one step of a training, examples influence each other's gradients.

    Args:
        batches: Batches of the first optimizer step, in the order of the model's calls.
        losses: Findings about the loss of that step; empty if it is a sum over equally weighted tokens.
        unread_losses: Why the loss was not judged; empty if it was.
    """

    batches: tuple[BatchJudgement, ...] = ()
    losses: tuple[LossJudgement, ...] = ()
    unread_losses: str = ""

    @property
    def is_mixed(self) -> bool:
        """Whether an example influences another's gradient, other than by definition."""
        return any(batch.verdict == "mixed" for batch in self.batches) or any(
            loss.kind != "purpose" for loss in self.losses
        )

    @property
    def headline(self) -> str:
        """The result in one line."""
        counts = {kind: sum(batch.verdict == kind for batch in self.batches) for kind in ("mixed", "alone", "purpose")}
        total = len(self.batches)
        if counts["mixed"]:
            return f"examples are mixed in {counts['mixed']} of {total} batch{'es' * (total != 1)}"
        if self.is_mixed:
            return "the loss treats examples differently in a batch than alone"
        judged = counts["alone"] + counts["purpose"]
        if not judged:
            return "examples were not judged"
        rest = f"; {total - judged} not judged" if judged < total else ""
        aim = f" ({counts['purpose']} mixed on purpose)" if counts["purpose"] else ""
        told = f"in {judged} of {total} batches{aim}{rest}"
        if self.losses:
            return f"each example's outputs are those of the example alone, {told}; the loss reads several examples"
        if self.unread_losses:
            return f"each example's outputs are those of the example alone, {told}; the loss was not judged"
        return f"each example's gradient is that of the example alone, {told}"

    def lines(self) -> list[tuple[str, list[str]]]:
        """Return the findings: a headline, and sentences below it; equal batches once, with their count."""
        found: dict[tuple[str, ...], int] = {}
        for batch in self.batches:
            key = tuple(batch.lines())
            found[key] = found.get(key, 0) + 1
        shown = [
            (f"{lines[0]}{f' ({count} batches)' if count > 1 else ''}", list(lines[1:]))
            for lines, count in found.items()
        ]
        shown += [
            (f"the loss: {loss.detail}", [f"to do: {loss.advice}"] if loss.advice else []) for loss in self.losses
        ]
        if self.unread_losses:
            shown.append((f"the loss was not judged: {self.unread_losses}", []))
        return shown

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> IsolationReport:
        """Return the report for the result of ``dataclasses.asdict``, also after JSON."""
        batches = []
        for item in content["batches"]:
            lists = {name: tuple(item[name]) for name in ("affected", "differences")}
            pairs = tuple(MixedPair(**pair) for pair in item["pairs"])
            batches.append(BatchJudgement(**(item | lists | {"pairs": pairs})))
        losses = tuple(LossJudgement(**item) for item in content["losses"])
        return cls(tuple(batches), losses, content["unread_losses"])
