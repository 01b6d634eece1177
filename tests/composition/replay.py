"""Repeats the decisions of another run: where numbers are rounded to bfloat16, the largest of two is an accident."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsebp_cli.policy import (
    Budget,
    GradientSelector,
    InformedSelector,
    Reading,
    Seen,
    Selection,
    Site,
    Split,
    SplitTypes,
    Step,
)
from tests.promise import Nothing
from tests.selector import Promises

Decisions = dict[tuple[str, Step], "Selection | Split | None"]


class Recorder(Promises):
    """Asks another policy, and notes what it says."""

    inner: GradientSelector
    decisions: Any  # a Decisions; pydantic would copy it

    @property
    def selection(self) -> type[Selection] | None:
        return self.inner.selection

    @property
    def budget(self) -> float | Budget:
        return self.inner.budget

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        found = self.inner.select(grad_NO, site, step)
        self.decisions[site.name, step] = found
        return found


class Replayer(Recorder):
    """Says what was noted."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        return self.decisions[site.name, step]


class InformedRecorder(Nothing, InformedSelector):
    """Asks another policy that sees more than the gradient, and notes what it says."""

    inner: InformedSelector
    decisions: Any  # a Decisions; pydantic would copy it

    @property
    def selection(self) -> type[Selection] | None:
        return self.inner.selection

    @property
    def split(self) -> SplitTypes | None:
        return self.inner.split

    @property
    def reads(self) -> frozenset[Reading]:
        return self.inner.reads

    @property
    def budget(self) -> float | Budget:
        return self.inner.budget

    def choose(self, seen: Seen, site: Site, step: Step) -> Selection | Split | None:
        found = self.inner.choose(seen, site, step)
        self.decisions[site.name, step] = found
        return found


class InformedReplayer(InformedRecorder):
    """Says what was noted."""

    def choose(self, seen: Seen, site: Site, step: Step) -> Selection | Split | None:
        return self.decisions[site.name, step]


def repeat(inner: GradientSelector, decisions: Decisions) -> tuple[GradientSelector, GradientSelector]:
    """Return a policy that notes another one's decisions, and one that repeats them."""
    if isinstance(inner, InformedSelector):
        return InformedRecorder(inner=inner, decisions=decisions), InformedReplayer(inner=inner, decisions=decisions)
    return Recorder(inner=inner, decisions=decisions), Replayer(inner=inner, decisions=decisions)
