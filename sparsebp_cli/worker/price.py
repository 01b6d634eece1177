"""Compute the cost of an optimizer step, in FLOPs of forward, backward, update and trial passes. All parts of SparseBP
use this cost.

Counting slows a step down and changes its last bits, so passes are counted in trial steps, at some steps of the run.
The cost of other steps is predicted from counts of similar steps (:mod:`sparsebp_cli.worker.step_kind`), scaled by the
batch's shape. In a dense pass, products with weights grow with the positions, and attention with the square of the
length. The update is counted at the first step, as it happens. From then on its cost is proportional to the
number of entries that it changes. The event log records the cost of each step, so readers add up instead of counting
again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.run import metric
from sparsebp_cli.worker.step_kind import CountedSteps, StepKind

Shape = tuple[float, float]  # examples and padded length of a micro-batch
# See decision 22.
FIRST, MOST = 8, 32  # counted steps at the start; with a work limit, then at least one in MOST
SELDOM = 16  # without a limit, at most one in so many steps is counted after the first ones
NEW = 4  # additional counts for each kind of step that was not counted before
KNOWN = 0.01  # without a limit: relative standard error of the cost, from which on only probes count
MEMORY = 100  # number of counts
NUMBERS = ("per_entry", "due", "own", "made", "more", "extra")  # that a checkpoint stores as they are
TOLERANCE = 0.004  # standard error of the work of all steps so far, relative to that work


@dataclass(frozen=True)
class CountedPass:
    """FLOPs of forward and backward over one micro-batch."""

    policy: float
    dense: float
    attention: float  # part of the dense FLOPs that grows with the square of the length
    examples: float
    length: float

    def scale(self, shape: Shape) -> float:
        """Return the work of a micro-batch of another shape as a multiple of this one's."""
        longer = shape[1] / self.length
        share = self.attention / self.dense if self.dense else 0.0
        return shape[0] / self.examples * longer * (1.0 - share + share * longer)


@dataclass
class CountSpread:
    """Mean and variance of counts, with slowly fading weights of older ones. A policy may make an expensive step once
    in a hundred, which the last few counts do not show. If a policy changes for long, its variance changes too."""

    number: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, share: float) -> None:
        """Add a count; the first ``MEMORY`` counts have equal weights."""
        self.number += 1
        weight, distance = 1.0 / min(self.number, MEMORY), share - self.mean
        self.mean += weight * distance
        self.variance = (1.0 - weight) * (self.variance + weight * distance**2)

    @property
    def relative(self) -> float:
        """The standard deviation over the mean."""
        return math.sqrt(self.variance) / self.mean if self.mean else 0.0


@dataclass
class StepPrice:
    """Computes the cost of one process's steps from the counts of some of them."""

    counted: CountedPass | None = None
    per_entry: float = 0.0  # FLOPs of clipping and update for each entry of a parameter
    spread: CountSpread = field(default_factory=CountSpread)  # policy FLOPs over dense FLOPs
    due: int = 0  # the next step (from 1) to count for a work limit
    trained: tuple[bool, ...] = ()  # for each parameter, whether it had a gradient in the last step
    known: CountedSteps = field(default_factory=CountedSteps)
    own: int = 0  # the step (from 1) that was counted itself, with its own draws
    made: int = 0  # number of counts, without those of probes
    more: int = 0  # additional counts allowed because of steps of unknown kinds
    extra: int = 0  # of these, the counts made under a work limit
    unknown: StepKind | None = None  # kind of a step that was unlike all counted steps

    def see_probe(self, counted: CountedPass, kind: StepKind) -> None:
        """Add a count whose random draws differ from those of a training step."""
        self.counted = counted
        self.known.add(kind, counted.policy / counted.dense)

    def is_due(self, step: int, *, is_limited: bool) -> bool:
        """Return whether to count a step (from 1) before it is made.

        With a work limit, :meth:`count` determines the steps. A step of an unknown kind adds some, so that the steps of
        a policy that begins later do not cost as much as dense ones until the next count. Without a limit, count the
        first steps. Later, count while there are unknown kinds or the cost is uncertain: few steps, at irregular
        intervals, so that the counts do not always meet the same kind of step of a policy that alternates.
        """
        if self.counted is None:
            return False
        if is_limited:
            return step >= self.due or (self.unknown is not None and self.extra < self.more)
        if step <= FIRST:
            return True
        allowed = FIRST + self.more + (step - 1 - FIRST) // SELDOM
        is_unsure = self.unknown is not None or self.known.error > KNOWN
        return is_unsure and self.made < allowed and random.Random(step).random() < 1 / 2

    def count(self, counted: CountedPass, kind: StepKind, step: int) -> None:
        """Add a count of a step, and determine the next step to count.

        One count used for k steps, with relative spread v of the counts, has a standard error of v sqrt(k (k - 1))
        steps. Relative to the work of N steps so far, that is v sqrt((k - 1) / N).
        """
        self.see_probe(counted, kind)
        self.own, self.made, self.extra = step, self.made + 1, self.extra + (step < self.due)
        if self.unknown is not None and self.known.knows(self.unknown):
            self.unknown = None
        self.spread.add(counted.policy / counted.dense)
        spread = self.spread.relative
        most = MOST if spread * math.sqrt(MOST) < TOLERANCE else 1.0 + step * (TOLERANCE / spread) ** 2
        self.due = step + (1 if self.spread.number < FIRST else min(MOST, int(most)))

    def price(
        self,
        step: int,
        kind: StepKind,
        shapes: Iterable[Shape],
        updated: int,
        trained: int,
        trials: float = 0.0,
    ) -> dict[str, float | None]:
        """Return the FLOPs of a step (from 1) over micro-batches of one process, and of a dense step over the same
        ones; None before the first count. The step updates ``updated`` of the ``trained`` entries that dense trains.
        ``trials`` are the FLOPs of trial passes before it."""
        if self.counted is None:
            return {metric.STEP_FLOPS.name: None, metric.DENSE_STEP_FLOPS.name: None}
        if not self.known.knows(kind):
            self.more += NEW * (self.unknown is None)
            self.unknown = kind
        scale, update = sum(map(self.counted.scale, shapes)), self.per_entry * updated
        is_own = step == self.own or not self.known.counts
        share = self.counted.policy / self.counted.dense if is_own else self.known.predict(kind)
        dense = self.counted.dense * scale
        return {
            metric.STEP_FLOPS.name: share * dense + update + trials,
            metric.DENSE_STEP_FLOPS.name: dense + self.per_entry * trained,
            metric.UPDATE_FLOPS.name: update,
            metric.DENSE_UPDATE_FLOPS.name: self.per_entry * trained,
        }

    def see(self, trained: tuple[bool, ...], step: int, per_entry: float | None = None) -> None:
        """Restart counting after ``step`` if other parameters had a gradient than in the step before. ``per_entry`` is
        the counted FLOPs of its update per entry, if known."""
        self.per_entry = self.per_entry if per_entry is None else per_entry
        if self.trained and trained != self.trained:
            self.due, self.spread = step + 1, CountSpread()
        self.trained = trained

    def state_dict(self) -> dict[str, object]:
        """Return the counts for a checkpoint. They are the same in each run of a plan."""
        return {name: getattr(self, name) for name in NUMBERS} | {
            "counted": None if self.counted is None else astuple(self.counted),
            "spread": asdict(self.spread),
            "trained": list(self.trained),
            "known": self.known.state_dict(),
            "unknown": None if self.unknown is None else astuple(self.unknown),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the counts of a checkpoint. A checkpoint of an older version has none."""
        for name in NUMBERS:
            setattr(self, name, state.get(name, 0))
        self.counted = CountedPass(*counted) if (counted := state.get("counted")) else None
        self.spread = CountSpread(**state.get("spread", {}))
        self.trained = tuple(state.get("trained", ()))
        self.known = CountedSteps.from_state(state.get("known"))
        self.unknown = StepKind(unknown[0], tuple(unknown[1])) if (unknown := state.get("unknown")) else None


def find_updated(optimizer: torch.optim.Optimizer, *, all_of_them: bool) -> tuple[int, tuple[bool, ...]]:
    """Return the number of entries that an update changes, and which parameters these belong to: those with a gradient,
    or with ``all_of_them`` all parameters of the optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = tuple(all_of_them or p.grad is not None for p in parameters)
    return sum(p.numel() for p, is_one in zip(parameters, found, strict=True) if is_one), found


def shape_of(batch: Mapping[str, Tensor]) -> Shape:
    """Return the number of examples of a micro-batch, and their padded length."""
    examples, length = batch["input_ids"].shape
    return examples, length


def join_shapes(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of one micro-batch with as many positions, and pairs of positions, as all ``shapes`` have."""
    if len(shapes) == 1:
        return shapes[0]
    positions = sum(examples * length for examples, length in shapes)
    length = sum(examples * length**2 for examples, length in shapes) / positions
    return positions / length, length
