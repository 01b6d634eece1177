"""A gradient policy of the tests: it promises nothing, and each test says what it selects."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsebp_cli.policy import GradientSelector, Selection, Site, Step
from tests.promise import Nothing


class Promises(Nothing, GradientSelector):
    """What the contract asks for beside the decision, at its loosest."""

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def selection(self) -> type[Selection] | None:
        return None


class Given(Promises):
    """Select what the test says."""

    given: Any = None

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.given is None else type(self.given)

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        return self.given
