"""Protocols around the engine: site adapters, extensions, and the views of the engine that both get.

Adapters and extensions depend on these protocols instead of the engine, so that imports run in one direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, runtime_checkable

from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsebp_cli.backward.core.report import Chosen, EagerReport, FlopEstimate, OutputUse, Route
    from sparsebp_cli.policy import Budget, GradientSelector, Policy, Reading, Seen, Selection, Site, Split, Step

    Share = tuple[type[Selection] | None, float]


@dataclass
class ShortForward:
    """A forward that runs only some positions or examples of a batch."""

    num_rows: int | None = None  # positions of the whole batch, B*T; None: the forward runs all positions
    scale: float = 1.0  # examples of the batch over those that run
    called: set[str] = field(default_factory=set)  # linears that have run in it


class EngineView(Protocol):
    """The engine as an extension sees it."""

    enabled: bool  # whether policies are active
    reference: bool  # whether to mask gradients, then multiply densely
    notes: dict[str, str]  # sentences for the report on how policies are carried out, by topic
    batch_sizes: frozenset[int] | None  # candidates, from the last forward; empty: unknown; None: not needed
    dense_rows: int | None  # B*T of the last batch of which a compiled graph ran some positions; None: there is none

    @property
    def is_probing(self) -> bool:
        """Whether the pass under way is a measurement, which trains nothing."""

    def now(self) -> Step:
        """Return the step of the backward under way, or of the next one."""

    def probing(self, draw: int = 1, *, feedback: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the policy is applied without side effects."""

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context in which everything is dense and nothing is counted at sites."""

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context that scales the counts at sites during a forward that skips positions or examples."""

    def add_chosen(self, chosen: Chosen) -> None:
        """Count what was chosen of a batch before its forward."""

    def add_route(self, route: Route) -> None:
        """Count where a router sent the gradient of one backward."""


class Decisions(Protocol):
    """Decisions about the gradients that arrive at sites."""

    has_selectors: bool  # whether there is a policy that decides

    def check_inside(self) -> None:
        """Refuse a backward that does not run through the engine."""

    def decide(
        self, site: Site, grad_NO: Tensor, work: SiteCost, dense_rows: int | None = None
    ) -> tuple[Tensor, Selection | None]:
        """Return the gradient to use and the selection of it; None for everything."""

    def decide_linear(
        self, site: Site, seen: Seen, work: SplitCost, dense_rows: int | None = None
    ) -> tuple[Tensor, Selection | Split | None, Budget]:
        """Do the same at a linear, where dgrad and wgrad may be selected apart; return the declared shares, too."""

    def reads_at(self, site: Site) -> frozenset[Reading]:
        """Return what the policy at a site reads beside the gradient."""

    def selection_at(self, site: Site) -> type[Selection] | None:
        """Return the type that the policy at a site selects, whatever the step; None: it stays dense."""


class SiteEngine(EngineView, Protocol):
    """The engine as a site sees it: sites also request decisions."""

    @property
    def decisions(self) -> Decisions:
        """What decides about gradients."""

    stores: bool  # whether branches store the outputs of their linears
    forward: ShortForward | None  # the current forward, if it skips positions or examples

    def policy_at(self, site: Site) -> GradientSelector | None:
        """Return the policy that decides at a site in the current or next backward; None: dense."""


class SiteAdapter(Protocol):
    """Installs an engine at the sites of one kind in one model."""

    names: tuple[str, ...]  # sites known before the first backward, in the model's order
    not_covered: tuple[str, ...]  # modules of this kind with a forward of their own: their backward stays dense
    excluded: tuple[str, ...]  # modules that the user excluded

    def install(self, engine: SiteEngine) -> None:
        """Override modules so that their sites call this engine."""

    def remove(self) -> None:
        """Restore the model."""

    def backward_context(self, loss: Tensor) -> AbstractContextManager[Tensor | None]:
        """Return the context in which the backward of ``loss`` runs; a tensor that it yields is differentiated
        instead.
        """


class SiteCost(Protocol):
    """The dense work of one site in one backward, and the share of it that a policy claims to execute."""

    @property
    def pads(self) -> bool:
        """Whether every example multiplies as many rows as the example that keeps most."""

    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return dense and claimed FLOPs for a kind of selection, None for dense, and a share of kept entries in (0,
        1].
        """


@runtime_checkable
class SplitCost(SiteCost, Protocol):
    """The work of a site whose dgrad and wgrad may be selected apart."""

    def claim_split(self, dgrad: Share, wgrad: Share) -> FlopEstimate:
        """Return dense and claimed FLOPs for a kind of selection and a share of kept entries, for each product."""


class EngineExtension(Protocol):
    """A policy that does not decide at sites, or another way to run a pass."""

    def install(self, engine: EngineView) -> None:
        """Change the model; ``engine.now()`` is the step, ``engine.enabled`` whether policies are active."""

    def remove(self) -> None:
        """Restore the model."""

    def enable(self, enabled: bool) -> None:
        """Activate the policy, or make the model run as without it."""

    def start_step(self, step: Step) -> None:
        """Prepare for an optimizer step; called at attach, after each optimizer step, and on resume."""


@runtime_checkable
class AcceptsColumns(Protocol):
    """An extension whose policy reads columns of the batch."""

    def set_columns(self, **columns: Tensor) -> None:
        """Set columns that the model's forward will not get; they stay set until the next call."""


@runtime_checkable
class ChecksArguments(Protocol):
    """An extension that can say before a training which arguments of the model's forward it does not know."""

    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Refuse a batch by the names of its arguments."""


@runtime_checkable
class ScoresForwards(Protocol):
    """An extension whose policy acts on forwards without a gradient of which it knows what is read."""

    def reading_by(self, labels: Tensor | None, reads: Literal["labels", "loss"]) -> AbstractContextManager[None]:
        """Return a context in which a script reads no more of such forwards than it has said."""


@runtime_checkable
class PlansUpdates(Protocol):
    """An extension whose policy computes what several micro-batches of an optimizer step share once for all of them."""

    def expect(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Take the arguments of the coming forwards of one step; return whether they share anything."""

    def finish_pass(self) -> None:
        """Finish the backward of a micro-batch: of what it was the last one to read."""


@runtime_checkable
class RequiresForward(Protocol):
    """An extension whose policy is called in the model's forward."""

    def check_called(self) -> None:
        """Refuse a backward if the policy has not been called since the model was attached."""


@runtime_checkable
class EstimatesFlops(Protocol):
    """An extension whose policy claims to skip work of the backward."""

    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the estimated FLOPs under the policy, as of the current step, of a dense pass on the same batch."""


@runtime_checkable
class EstimatesGradients(Protocol):
    """An extension that computes gradients without a backward."""

    def estimate(self, forward: Callable[[], Tensor], step: Step) -> Tensor:
        """Add an estimate of the gradient of the loss that ``forward`` returns to ``.grad`` of the trained parameters,
        and return a loss to report, without a graph. Weights and buffers are afterwards those of before.
        """


@runtime_checkable
class FreezesParameters(Protocol):
    """An extension that excludes parameters from training, so a backward may end before it reaches a site."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model trains in general but not in the current step."""


@runtime_checkable
class TellsWork(Protocol):
    """An extension whose passes cost unlike amounts, by no share that the engine counts."""

    @property
    def work_shares(self) -> tuple[float, ...]:
        """Shares that the FLOPs of the last training pass follow, each between 0 and 1, such as that of blocks with a
        backward; equally many at all times.
        """


@runtime_checkable
class CountsGradients(Protocol):
    """An extension whose policy makes gradients of a training step smaller than those that a probe shows."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of a training step."""


@runtime_checkable
class TrainsFrozen(Protocol):
    """An extension whose policy may train weights that the user froze, as those under adapters are."""

    @property
    def trains_frozen(self) -> bool:
        """Whether it does, so that adapters alone are not the model."""


@runtime_checkable
class ComparesSteps(Protocol):
    """An extension that compares its own step with the plain one at some batches, beside the work of the policy."""

    @property
    def uncharged_comparisons(self) -> int:
        """Comparisons so far that no measurement of a step shows; each is a plain pass and one of its own."""


@runtime_checkable
class KeepsOutputs(Protocol):
    """An extension that takes a part of the forward from what an earlier one has computed."""

    @property
    def left_out(self) -> float:
        """FLOPs that the last forward did not execute."""

    def take_use(self) -> OutputUse:
        """Return what training forwards have used since the last call."""


@runtime_checkable
class RunsPass(Protocol):
    """An extension that runs the backward pass itself and changes parameters during it."""

    report: EagerReport | None
    counting: UpdateFlops | None  # counts the updates of the coming pass

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
        """Run one backward pass through ``differentiate``, which takes the arguments of ``loss.backward``.

        ``backward`` is the function that the user runs a pass with, None for ``torch.Tensor.backward``. Without
        ``updates`` no parameter changes and gradients stay in ``.grad``.
        """


@runtime_checkable
class KeepsState(Protocol):
    """An extension that stores entries in the engine's state."""

    def state_dict(self) -> dict[str, Any]:
        """Return entries that a resumed run needs, under names that no other extension uses."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore its own entries from the engine's state."""


def name_parameters(model: nn.Module, adapter: SiteAdapter) -> dict[int, str]:
    """Return the names of parameters by ``id``; for a shared one, prefer a name that the report does not list
    elsewhere.
    """
    listed = {*adapter.not_covered, *adapter.excluded}
    names = list(model.named_parameters(remove_duplicate=False))
    names.sort(key=lambda pair: pair[0].rpartition(".")[0] in listed)
    return {id(p): name for name, p in names}


def trains_at_sites(model: nn.Module, adapter: SiteAdapter) -> bool:
    """Whether a site has trained weights, so that a loss of this model must depend on it: not if only adapters are
    trained and they are excluded.
    """
    modules = dict(model.named_modules())
    sites = (modules[name] for name in adapter.names if name in modules)
    return any(p.requires_grad for module in sites for p in module.parameters())


def refuse_uncalled(policy: Policy, model: nn.Module) -> NoReturn:
    """Raise :class:`UsageError`: a backward came, and the forward of the model never called the policy."""
    if not model.training:
        raise UsageError(
            f"{type(policy).__name__} was never asked: {type(model).__name__} is in eval mode, as from_pretrained "
            "returns it, and this policy acts in training alone; call model.train() before the loop, and after each "
            "evaluation"
        )
    raise UsageError(
        f"{type(policy).__name__} was never asked: a backward came, and before it no forward of {type(model).__name__} "
        "in training with gradients; a script that calls parts of the model by themselves, or something that kept the "
        "forward from before the model was attached, goes past the policy"
    )
