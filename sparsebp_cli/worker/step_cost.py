"""Compare the cost of a policy's step with that of a dense step, before training.

A dense step on a fraction r of the batch costs as much as a policy's step that needs a fraction r of the FLOPs. If the
policy trains a fraction p of the targets, examples or token positions, each must be worth r / p dense ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from sparsebp_cli.policy import GradientSelector, Policy, Rows
from sparsebp_cli.run import metric
from sparsebp_cli.worker.probe import Probe, cost_ratio

Unit = Literal["targets", "examples", "rows", "entries"]


@dataclass(frozen=True)
class RelativeCost:
    """The cost of a policy's step, and the fraction that it trains."""

    cost_ratio: float  # r: counted FLOPs of forward and backward over those of a dense step
    seconds_ratio: float  # the same ratio in time; policy and dense were timed alternately
    unit: Unit | None = None  # what the policy selects; None for dense, frozen parameters and routers
    share: float | None = None  # p: fraction of the units that is trained; None if nothing is selected

    @classmethod
    def of(cls, probe: Probe, policies: Sequence[Policy]) -> Self:
        """Return the cost that a probe measured."""
        policy, dense = (probe.values[one.name] for one in (metric.PROBE_POLICY_SECONDS, metric.PROBE_DENSE_SECONDS))
        assert policy is not None
        assert dense is not None
        ratio = cost_ratio(probe.proof.dense, probe.proof.policy)
        return cls(ratio, policy / dense, *_find_selected(probe, policies))

    @property
    def unit_worth(self) -> float | None:
        """r / p: how many dense units a kept unit must be worth; None if nothing is selected."""
        return self.cost_ratio / self.share if self.share else None

    def describe(self) -> str:
        """Describe the cost in one line; empty if it equals the cost of a dense step."""
        if self.share is None and abs(self.cost_ratio - 1.0) < 0.005:
            return ""
        text = (
            f"forward and backward of the first step take {self.cost_ratio:.2f} times the FLOPs of dense training, and "
            f"{self.seconds_ratio:.2f} times its time (timed alternately)"
        )
        if self.share is None or self.share >= 1.0:
            return text
        return (
            f"{text}; the policy keeps {self.share:.0%} of the {self.unit}. `sparsebp worth RECIPE` estimates whether "
            "the policy can beat a smaller batch"
        )

    def metrics(self) -> dict[str, float | None]:
        """Return metric values by name."""
        return {
            metric.CHOICE_COST.name: self.cost_ratio,
            metric.CHOICE_SECONDS.name: self.seconds_ratio,
            metric.CHOICE_SHARE.name: self.share,
            metric.CHOICE_WORTH.name: self.unit_worth,
        }


def _find_selected(probe: Probe, policies: Sequence[Policy]) -> tuple[Unit | None, float | None]:
    """Return the unit that the policies select and the fraction of it that is trained."""
    chosen, kept = probe.policy.report.chosen, probe.policy.report.kept_share
    if chosen is not None and chosen.examples:
        return "examples", chosen.chosen_examples / chosen.examples
    if chosen is not None:
        return "targets", chosen.trained_share
    selectors = [policy for policy in policies if isinstance(policy, GradientSelector)]
    selections = {policy.selection for policy in selectors} - {None}
    if kept is None or not selections:
        return None, None
    return "rows" if selections == {Rows} else "entries", kept
