"""What carries out the policies that are not asked at sites: before a step, or in the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sparsebp_cli.backward.engine import Engine
    from sparsebp_cli.policy import Step


class Part(Protocol):
    """One policy at work in one model, beside the binding of its sites."""

    def install(self, engine: Engine) -> None:
        """Change the model; ``engine.now()`` tells the step, ``engine.enabled`` whether the policy is in force."""

    def remove(self) -> None:
        """Give the model back as it was."""

    def enable(self, enabled: bool) -> None:
        """Be in force, or leave the model as it would be without the policy."""

    def start_step(self, step: Step) -> None:
        """Prepare for an optimizer step: called when attached, after each step of the optimizer, and on resume."""
