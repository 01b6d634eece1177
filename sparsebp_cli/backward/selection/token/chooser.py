"""Who says which positions of a batch are trained: the seam between choosing positions and carrying the choice out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sparsebp_cli.policy import Step
from sparsebp_cli.policy.token import TokenChoice

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.engine import Engine


class Chooser(Protocol):
    """Chooses positions of one batch."""

    def choose(self, arguments: Mapping[str, Any], plain_forward: Callable[..., Any], step: Step) -> TokenChoice:
        """Choose positions. Called in a forward in training, with gradients enabled, before anything is computed.

        Args:
            arguments: The forward's arguments by name, as the caller gave them: ``labels`` is among them, and
                ``input_ids`` or ``inputs_embeds``. Columns that the model's own forward does not know are among them
                too; whoever carries the choice out removes ``columns``. Nothing may be changed.
            plain_forward: The model's own forward, as it would be without the policy; for scores. It follows the
                gradient and training mode that it is called in.
            step: When.

        Returns:
            Two boolean tensors of the labels' shape.
        """

    def install(self, engine: Engine) -> None:
        """Be told whose clock and counters these are, before the first choice."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of arguments that only the chooser reads."""
