"""What ties an engine to a model: the places where it takes part in the backward, and how to leave them again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.engine import Engine
    from sparsebp_cli.backward.core.report import Claim
    from sparsebp_cli.policy import Selection


class Binding(Protocol):
    """The sites of one kind in one model.

    Args:
        names: Sites that are known before the first backward, in the model's order.
        not_covered: Places of this kind that compute in their own way: their backward is dense.
        excluded: Places that the user left out.
    """

    names: tuple[str, ...]
    not_covered: tuple[str, ...]
    excluded: tuple[str, ...]

    def install(self, engine: Engine) -> None:
        """Change the model so that its sites ask this engine."""

    def remove(self) -> None:
        """Give the model back as it was."""

    def around(self, loss: Tensor) -> AbstractContextManager[Tensor | None]:
        """Return what is in force while the backward of ``loss`` runs; what it yields is differentiated instead."""


class Work(Protocol):
    """The dense work of one site in one backward, and what a policy leaves of it."""

    @property
    def pads(self) -> bool:
        """Whether every example multiplies as many rows as the one that keeps most."""

    def claim(self, selection: type[Selection] | None, budget: float) -> Claim:
        """Return both as FLOPs.

        Args:
            selection: The kind of selection; None: dense.
            budget: Share of entries that the policy keeps, in (0, 1].

        Returns:
            Dense and claimed.
        """
