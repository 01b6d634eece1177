"""What an optimizer step costs, in FLOPs of forward, backward, update and trial passes: the one price of the project.

Counting slows a step down and changes its last bits, so passes are counted in trial steps, at some steps of the run.
The others are charged by what these counts tell of steps of their kind (:mod:`sparsebp_cli.worker.step_kind`), in
proportion to the shape of the batch: of a dense pass the products with weights grow with the positions, and attention
with the square of the length. The update is counted at the first step of a phase, as it is made, and from then on in
proportion to the entries that it changes.
The journal has the price of each step, so whoever reads the run adds up instead of counting again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field

import torch
from torch import Tensor

from sparsebp_cli.run import metric
from sparsebp_cli.worker.step_kind import CountedSteps, StepKind

Shape = tuple[float, float]  # examples and padded length of a micro-batch
# See decision 22.
FIRST, MOST = 8, 32  # each phase begins with so many counted steps; with a limit of work one of MOST at least follows
SELDOM = 16  # without a limit, one of so many steps is counted at most after the first ones
NEW = 4  # more for each kind of step that none of the counted ones was
KNOWN = 0.01  # without a limit: standard error of the price, relative, from which on probes alone count
MEMORY = 100  # counts
TOLERANCE = 0.004  # standard error of the work of all steps so far, over that work


@dataclass(frozen=True)
class CountedPass:
    """FLOPs of forward and backward over one micro-batch."""

    policy: float
    dense: float
    attention: float  # of dense's: what grows with the square of the length
    examples: float
    length: float

    def scale(self, shape: Shape) -> float:
        """Return the work of another micro-batch as a multiple of this one's."""
        longer = shape[1] / self.length
        share = self.attention / self.dense if self.dense else 0.0
        return shape[0] / self.examples * longer * (1.0 - share + share * longer)


@dataclass
class Spread:
    """Mean and variance of counts. Older ones fade slowly: a policy may make a dearer step once in a hundred, which the
    last few counts do not show, and one that has changed for long has another variance."""

    number: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, share: float) -> None:
        """Take in one more count; the first ``MEMORY`` have equal weights."""
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
    """Prices the steps of one process from what was counted in some of them."""

    counted: CountedPass | None = None
    per_entry: float = 0.0  # FLOPs of clipping and update by entry of a parameter
    spread: Spread = field(default_factory=Spread)  # of the policy's FLOPs over dense's
    due: int = 0  # the next step (from 1) that a limit of work needs counted
    trained: tuple[bool, ...] = ()  # which parameters the last step had a gradient of
    known: CountedSteps = field(default_factory=CountedSteps)  # of this phase
    own: int = 0  # the step (from 1) that was counted itself, by its own draws
    made: int = 0  # counts of this phase beside those of probes
    begun: int = 0  # the first step of this phase
    more: int = 0  # counts that steps of unknown kinds have asked for
    unknown: StepKind | None = None  # of a step that was like none of those that were counted

    def begin(self, counted: CountedPass, kind: StepKind, step: int) -> None:
        """Take over the first count of a phase, whose policies have another price, before its first step."""
        self.counted, self.due, self.spread = counted, 0, Spread()
        self.known, self.unknown = CountedSteps(), None
        self.own, self.made, self.more, self.begun = 0, 0, 0, step
        self.see_probe(counted, kind)

    def see_probe(self, counted: CountedPass, kind: StepKind) -> None:
        """Take over a count that drew otherwise than a step of the training."""
        self.counted = counted
        self.known.add(kind, counted.policy / counted.dense)

    def is_due(self, step: int, *, is_limited: bool) -> bool:
        """Return whether a step (from 1) is to be counted before it is made.

        Without a limit of work that are the first of a phase, and later ones as long as there are unknown kinds or the
        price is not known well: few of them, and at irregular distances, so that they do not always fall on one kind of
        a policy that alternates.
        """
        if self.counted is None:
            return False
        if is_limited:
            return step >= self.due
        done = step - self.begun
        if done < FIRST:
            return True
        allowed = FIRST + self.more + (done - FIRST) // SELDOM
        is_unsure = self.unknown is not None or self.known.error > KNOWN
        return is_unsure and self.made < allowed and random.Random(step).random() < 1 / 2

    def count(self, counted: CountedPass, kind: StepKind, step: int) -> None:
        """Take over a count at a step, and say when the next is due.

        Charging k steps by one count, where counts vary by v of their mean, has a standard error of v sqrt(k (k - 1))
        of a step; over N steps so far that is v sqrt((k - 1) / N) of their work.
        """
        self.see_probe(counted, kind)
        self.own, self.made = step, self.made + 1
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
        left_out: float = 0.0,
    ) -> dict[str, float | None]:
        """Return the FLOPs of a step (from 1) over micro-batches of one process, and those of a dense step over the
        same ones; None while nothing was counted. The step updates so many entries of all that dense trains; ``trials``
        are the FLOPs of trial passes before it, ``left_out`` those of its forwards whose result was kept."""
        if self.counted is None:
            return {metric.STEP_FLOPS.name: None, metric.DENSE_STEP_FLOPS.name: None}
        if self.unknown is None and not self.known.knows(kind):
            self.unknown, self.more = kind, self.more + NEW
        scale, update = sum(map(self.counted.scale, shapes)), self.per_entry * updated
        is_own = step == self.own or not self.known.counts
        share = self.counted.policy / self.counted.dense if is_own else self.known.predict(kind)
        dense = self.counted.dense * scale
        return {
            metric.STEP_FLOPS.name: share * dense - left_out + update + trials,
            metric.DENSE_STEP_FLOPS.name: dense + self.per_entry * trained,
            metric.UPDATE_FLOPS.name: update,
            metric.DENSE_UPDATE_FLOPS.name: self.per_entry * trained,
        }

    def see(self, trained: tuple[bool, ...], step: int, per_entry: float | None = None) -> None:
        """Begin to count anew after ``step`` if other parameters had a gradient than in the step before. ``per_entry``
        are the FLOPs of its update by entry, if they were counted."""
        self.per_entry = self.per_entry if per_entry is None else per_entry
        if self.trained and trained != self.trained:
            self.due, self.spread = step + 1, Spread()
        self.trained = trained

    def state_dict(self) -> dict[str, object]:
        """Return what was counted, for a checkpoint: it is the same in each run of a plan."""
        return {
            "counted": None if self.counted is None else list(astuple(self.counted)),
            "per_entry": self.per_entry,
            "spread": asdict(self.spread),
            "due": self.due,
            "trained": list(self.trained),
            "known": self.known.state_dict(),
            "own": self.own,
            "made": self.made,
            "begun": self.begun,
            "more": self.more,
            "unknown": None if self.unknown is None else self.unknown.to_list(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on with what was counted when a checkpoint was made; one of an older version has nothing."""
        counted, per_entry = state.get("counted"), state.get("per_entry")
        self.counted = CountedPass(*counted) if isinstance(counted, list) else None
        self.per_entry = per_entry if isinstance(per_entry, float) else 0.0
        spread, due = state.get("spread"), state.get("due")
        self.spread = Spread(**spread) if isinstance(spread, dict) else Spread()
        self.due = due if isinstance(due, int) else 0
        trained = state.get("trained")
        self.trained = tuple(trained) if isinstance(trained, list) else ()
        self.known = CountedSteps.from_state(state.get("known"))
        numbers = (state.get(name) for name in ("own", "made", "more", "begun"))
        self.own, self.made, self.more, self.begun = (n if isinstance(n, int) else 0 for n in numbers)
        unknown = state.get("unknown")
        self.unknown = StepKind.of_list(unknown) if isinstance(unknown, list) else None


def find_updated(optimizer: torch.optim.Optimizer, *, all_of_them: bool) -> tuple[int, tuple[bool, ...]]:
    """Return the entries of the parameters that an update changes, those with a gradient or all of the optimizer's, and
    which parameters these are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = tuple(all_of_them or p.grad is not None for p in parameters)
    return sum(p.numel() for p, is_one in zip(parameters, found, strict=True) if is_one), found


def shape_of(batch: Mapping[str, Tensor]) -> Shape:
    """Return the examples of a micro-batch and their padded length."""
    examples, length = batch["input_ids"].shape
    return examples, length


def join_shapes(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of one micro-batch with as many positions, and pairs of positions, as several have together."""
    if len(shapes) == 1:
        return shapes[0]
    positions = sum(examples * length for examples, length in shapes)
    length = sum(examples * length**2 for examples, length in shapes) / positions
    return positions / length, length
