"""Repeats the decisions of another run: where numbers are rounded to bfloat16, the largest of two is an accident."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsebp_cli.policy import GradientSelector, Selection, Site, Step
from tests.selector import Promises

Decisions = dict[tuple[str, Step], "Selection | None"]


class Recorder(Promises):
    """Asks another policy, and notes what it says."""

    inner: GradientSelector
    decisions: Any  # a Decisions; pydantic would copy it

    @property
    def selection(self) -> type[Selection] | None:
        return self.inner.selection

    @property
    def budget(self) -> float:
        return self.inner.budget

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        found = self.inner.select(grad_NO, site, step)
        self.decisions[site.name, step] = found
        return found


class Replayer(Recorder):
    """Says what was noted."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        return self.decisions[site.name, step]
