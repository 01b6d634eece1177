"""What an engine is made of: adapters that put it at sites, and extensions that act elsewhere.

Both know the engine by the protocols below alone, so that no import runs back from them to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from sparsebp_cli.backward.observe.claim import DensePass, PassEstimate
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsebp_cli.backward.core.report import Chosen, EagerReport, FlopEstimate, Route
    from sparsebp_cli.policy import GradientSelector, Policy, Selection, Site, Step


@dataclass
class ShortForward:
    """A forward that runs some positions or examples in place of all, for the count of what was left out.

    Args:
        num_rows: Positions of the batch that it was given, B*T; None: it runs all of them.
        scale: Examples of the batch over those that it runs.
    """

    num_rows: int | None = None
    scale: float = 1.0
    _called: set[str] = field(default_factory=set)

    def dense_rows(self, name: str, num_rows: int) -> int:
        """Return the rows of the dense forward that a call of a linear stands for."""
        # Of several calls for parts of the positions, the first stands for all of them.
        if self.num_rows is not None:
            num_rows = 0 if name in self._called else self.num_rows
            self._called.add(name)
        return round(num_rows * self.scale)


class EngineView(Protocol):
    """What an extension sees of the engine that it is installed in.

    Args:
        enabled: Whether policies are in force.
        reference: Whether what is selected is masked, then multiplied densely.
        notes: How policies are carried out, by topic; they become lines of the report.
        batch_sizes: Numbers of examples in the model's last forward; empty: not known; None: no policy needs them.
    """

    enabled: bool
    reference: bool
    notes: dict[str, str]
    batch_sizes: frozenset[int] | None

    def now(self) -> Step:
        """Return the step of the backward under way, or of the next one."""

    def probing(self, draw: int = 1, *, feedback: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the policy is applied without a trace."""

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context in which sites count as what a forward stands for that leaves something out."""

    def add_chosen(self, chosen: Chosen) -> None:
        """Count what was chosen of a batch before its forward."""

    def add_route(self, route: Route) -> None:
        """Count where a router let the gradient of one backward go."""


class SiteEngine(EngineView, Protocol):
    """What a site sees of the engine: it also asks for decisions.

    Args:
        stores: Whether branches keep their linears' outputs.
        forward: The forward under way, where it leaves something out.
    """

    stores: bool
    forward: ShortForward | None

    def check_inside(self) -> None:
        """Refuse a backward that did not go through this engine."""

    def policy_at(self, site: Site) -> GradientSelector | None:
        """Return the policy that will decide at a site in the backward under way, or the next one; None: dense."""

    def decide(
        self, site: Site, grad_NO: Tensor, work: SiteCost, dense_rows: int | None = None
    ) -> tuple[Tensor, Selection | None]:
        """Return the gradient to go on with, and what is kept of it; None for everything."""


class SiteAdapter(Protocol):
    """Puts an engine at the sites of one kind in one model.

    Args:
        names: Sites that are known before the first backward, in the model's order.
        not_covered: Places of this kind that compute in their own way: their backward is dense.
        excluded: Places that the user left out.
    """

    names: tuple[str, ...]
    not_covered: tuple[str, ...]
    excluded: tuple[str, ...]

    def install(self, engine: SiteEngine) -> None:
        """Change the model so that its sites ask this engine."""

    def remove(self) -> None:
        """Give the model back as it was."""

    def around(self, loss: Tensor) -> AbstractContextManager[Tensor | None]:
        """Return what is in force while the backward of ``loss`` runs; what it yields is differentiated instead."""


class SiteCost(Protocol):
    """The dense work of one site in one backward, and what a policy leaves of it."""

    @property
    def pads(self) -> bool:
        """Whether every example multiplies as many rows as the one that keeps most."""

    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return both as FLOPs.

        Args:
            selection: The kind of selection; None: dense.
            budget: Share of entries that the policy keeps, in (0, 1].

        Returns:
            Dense and claimed.
        """


class EngineExtension(Protocol):
    """One policy, or one way to run a pass, at work in one model beside the sites."""

    def install(self, engine: EngineView) -> None:
        """Change the model; ``engine.now()`` tells the step, ``engine.enabled`` whether the policy is in force."""

    def remove(self) -> None:
        """Give the model back as it was."""

    def enable(self, enabled: bool) -> None:
        """Be in force, or leave the model as it would be without the policy."""

    def start_step(self, step: Step) -> None:
        """Prepare for an optimizer step: called when attached, after each step of the optimizer, and on resume."""


@runtime_checkable
class AcceptsColumns(Protocol):
    """An extension whose policy reads columns of the batch."""

    def give(self, **columns: Tensor) -> None:
        """Be given columns that the model's forward will not get; they count until the next call."""


@runtime_checkable
class RequiresForward(Protocol):
    """An extension whose policy is asked in the model's forward."""

    def check_asked(self) -> None:
        """Refuse a backward when the policy has not been asked since the model was attached."""


@runtime_checkable
class EstimatesFlops(Protocol):
    """An extension whose policy claims to leave work of the backward undone; others claim nothing."""

    def claim(self, dense: DensePass) -> PassEstimate:
        """Return what the policy, in force as at the step under way, leaves of a dense pass on the same batch."""


@runtime_checkable
class FreezesParameters(Protocol):
    """An extension that takes parameters out of training, so that a backward may end before it reaches a site."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model would train, and the step under way does not."""


@runtime_checkable
class RunsPass(Protocol):
    """An extension that runs the backward pass itself, and changes parameters in it."""

    report: EagerReport | None

    @property
    def gradient_norm(self) -> float:
        """2-norm of all gradients of the last pass that updated, before they were clipped; 0 before the first."""

    def run_pass(
        self,
        loss: Tensor,
        differentiate: Callable[..., None],
        *,
        backward: Callable[..., object] | None,
        updates: bool,
    ) -> None:
        """Run one backward pass.

        Args:
            loss: What is differentiated.
            differentiate: Runs the pass, with the arguments of ``loss.backward``.
            backward: What the user runs a pass with; None: ``torch.Tensor.backward``.
            updates: Whether parameters change in it; else their gradients are left where they are.
        """


@runtime_checkable
class KeepsState(Protocol):
    """An extension with entries of its own in the engine's state."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, by names that no other extension uses."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take its own entries out of the engine's state."""


def refuse_unasked(policy: Policy, model: nn.Module) -> NoReturn:
    """Refuse a backward of a model whose forward never reached the policy.

    Args:
        policy: That would have been asked in it.
        model: Whose forward it is.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"{type(policy).__name__} was never asked: a backward came, and before it no forward of {type(model).__name__} "
        "in training with gradients; a script that calls parts of the model by themselves, or something that kept the "
        "forward from before the model was attached, goes past the policy"
    )
