"""Describe the work of steps, and predict the cost of uncounted steps from counted ones.

FLOPs are counted only in some steps (:mod:`sparsebp_cli.worker.price`). But every step knows how much of the model a
policy froze, whether the batch was scored, and which fractions of entries, targets, positions, blocks and rows it kept.
The cost of a pass is almost linear in these fractions, so least squares fits the counts to them. A step's cost thus
follows counts of similar steps, not the last count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Self

import torch

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.core.report import Chosen

MEMORY = 64  # number of counts that are fitted; the latest ones describe a policy that changes slowly
LIKE = 0.05  # fraction by which a step may lie outside all counted ones and still be of a known kind
VARIES = 1e-6  # relative; smaller singular values are rounding


def describe_pass(engine: Engine, sizes: Mapping[str, int]) -> tuple[float, ...]:
    """Describe the last pass by numbers: the fraction of entries that it trained, the relative position of the first
    trained parameter (where backward may end), and the extensions' work shares. ``sizes`` maps the parameters that
    dense trains to their entries, in the model's order. Call it before the next step begins."""
    frozen = set[str]().union(*(part.frozen for part in engine.extensions))
    trained = [(place, name) for place, name in enumerate(sizes) if name not in frozen] if frozen else []
    entries = sum(sizes[name] for _, name in trained) / sum(sizes.values()) if frozen else 1.0
    first = (trained[0][0] if trained else len(sizes)) / len(sizes) if frozen else 0.0
    told = [part.work_shares for part in engine.extensions]
    return entries, first, *(share for shares in told for share in shares)


@dataclass(frozen=True)
class StepKind:
    """Whether a step scored its batch, and its fractions, in [0, 1]; each step has equally many."""

    scored: bool = False
    shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, passes: Sequence[tuple[float, ...]], kept: float | None, chosen: Chosen | None) -> Self:
        """Return the kind of a step from its passes' descriptions, the fraction of entries that its sites kept, and
        what was chosen from its batch."""
        shares, scored = [kept, None, None, None], False
        if chosen is not None:
            examples = chosen.chosen_examples / chosen.examples if chosen.examples else None
            shares[1:] = [chosen.trained_share, chosen.carried_share, examples]
            scored = float(chosen.scoring_seconds) > 0.0
        told = [fmean(one) for one in zip(*passes, strict=True)]
        # Round, because for the same step each way of summing has other last bits.
        return cls(scored, tuple(round(share, 6) for share in [*(1.0 if s is None else s for s in shares), *told]))


@dataclass
class CountedSteps:
    """The kinds of the last counted steps, each with the FLOPs of its passes over dense's."""

    kinds: list[StepKind] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def add(self, kind: StepKind, share: float) -> None:
        """Take in one more count."""
        self.kinds, self.counts = [*self.kinds, kind][-MEMORY:], [*self.counts, share][-MEMORY:]
        self.__dict__.pop("_fits", None)

    def knows(self, kind: StepKind) -> bool:
        """Return whether steps like this one were counted."""
        fit = self._fits.get(kind.scored)
        return fit is not None and fit.covers(kind.shares)

    def predict(self, kind: StepKind) -> float:
        """Return the FLOPs of a step's passes over dense's. Use all counts if no step, or every step, was scored."""
        fit = self._fits.get(kind.scored) or next(iter(self._fits.values()))
        return fit.predict(kind.shares)

    @property
    def error(self) -> float:
        """The relative standard error of the mean over many steps, from what the fractions do not explain."""
        rest = [c - self.predict(k) for c, k in zip(self.counts, self.kinds, strict=True)]
        return stdev(rest) / len(rest) ** 0.5 / fmean(self.counts) if len(rest) > 1 and any(self.counts) else 0.0

    @cached_property
    def _fits(self) -> Mapping[bool, _Fit]:
        return {
            scored: _Fit.of([(k.shares, c) for k, c in zip(self.kinds, self.counts, strict=True) if k.scored == scored])
            for scored in {kind.scored for kind in self.kinds}
        }

    def state_dict(self) -> dict[str, object]:
        """Return the counts for a checkpoint."""
        return {"kinds": [astuple(kind) for kind in self.kinds], "counts": self.counts}

    @classmethod
    def from_state(cls, state: object) -> Self:
        """Return the counts of a checkpoint. A checkpoint of an older version has none."""
        if not isinstance(state, dict):
            return cls()
        return cls([StepKind(scored, tuple(shares)) for scored, shares in state["kinds"]], list(state["counts"]))


@dataclass(frozen=True)
class _Fit:
    """Counts as a linear function of the fractions of their steps."""

    centre: tuple[float, ...]
    slopes: tuple[float, ...]
    mean: float
    least: float
    most: float
    hull: tuple[tuple[float, float], ...]  # the smallest and largest value of each fraction

    @classmethod
    def of(cls, counted: Sequence[tuple[tuple[float, ...], float]]) -> Self:
        shares_KS = torch.tensor([shares for shares, _ in counted], dtype=torch.float64)
        count_K = torch.tensor([count for _, count in counted], dtype=torch.float64)
        centre_S, mean = shares_KS.mean(0), count_K.mean()
        # Use the minimum-norm solution, because fractions may be redundant or constant.
        slope_S = torch.linalg.pinv(shares_KS - centre_S, rtol=VARIES) @ (count_K - mean)
        hull = zip(shares_KS.amin(0).tolist(), shares_KS.amax(0).tolist(), strict=True)
        ends = float(count_K.min()), float(count_K.max())
        return cls(tuple(centre_S.tolist()), tuple(slope_S.tolist()), float(mean), *ends, tuple(hull))

    def covers(self, shares: Sequence[float]) -> bool:
        return all(least - LIKE <= s <= most + LIKE for s, (least, most) in zip(shares, self.hull, strict=False))

    def predict(self, shares: Sequence[float]) -> float:
        terms = zip(shares, self.centre, self.slopes, strict=False)
        found = self.mean + sum(slope * (share - centre) for share, centre, slope in terms)
        return min(self.most, max(self.least, found))  # do not extrapolate beyond the counts
