"""What is around the engine: site adapters, extensions, and the views of the engine that both get.

Adapters and extensions depend on these classes instead of the engine, so that imports run in one direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, runtime_checkable

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


class EngineExtension:
    """What carries out a policy that does not decide at sites, or another way to run a pass.

    The engine calls every hook; each does nothing here. A subclass marks with ``typing_extensions.override`` the hooks
    that it defines, but for the first four. A method that merely has a hook's name would change what the engine does,
    so a class with one raises :class:`TypeError`.
    """

    hooks: ClassVar[frozenset[str]] = frozenset()  # names of those that the class or a base of it defines

    def __init_subclass__(cls, **options: object) -> None:
        """Find the hooks that a class defines."""
        super().__init_subclass__(**options)
        own = HOOKS & vars(cls).keys()
        for name in own:
            member = vars(cls)[name]
            if not getattr(getattr(member, "fget", member), "__override__", False):
                raise TypeError(
                    f"{cls.__name__}.{name} has the name of a hook of EngineExtension: mark it with "
                    "typing_extensions.override if it is the hook, or rename it"
                )
        cls.hooks = cls.hooks.union(own)

    def install(self, engine: EngineView) -> None:
        """Change the model; ``engine.now()`` is the step, ``engine.enabled`` whether policies are active."""

    def remove(self) -> None:
        """Restore the model."""

    def enable(self, enabled: bool) -> None:
        """Activate the policy, or make the model run as without it."""

    def start_step(self, step: Step) -> None:
        """Prepare for an optimizer step; called at attach, after each optimizer step, and on resume."""

    def set_columns(self, **columns: Tensor) -> None:
        """Set columns of the batch that the model's forward will not get; they stay set until the next call."""

    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Refuse a batch before a training by the names of the arguments that the model's forward would get."""

    def reading_by(self, labels: Tensor | None, reads: Literal["labels", "loss"]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which a script reads no more of forwards without a gradient than it has said."""
        return nullcontext()

    def expect(self, batches: Sequence[Mapping[str, Any]]) -> bool:  # noqa: ARG002
        """Take the arguments of the coming forwards of one step; return whether they share anything."""
        return False

    def finish_pass(self) -> None:
        """Finish the backward of a micro-batch: of what it was the last one to read."""

    def check_called(self) -> None:
        """Refuse a backward if the policy has not been called in a forward since the model was attached."""

    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the estimated FLOPs under the policy, as of the current step, of a dense pass on the same batch."""
        raise NotImplementedError

    def estimate(self, forward: Callable[[], Tensor], step: Step) -> Tensor:
        """Add an estimate of the gradient of the loss that ``forward`` returns to ``.grad`` of the trained parameters,
        without a backward, and return a loss to report, without a graph. Weights and buffers are afterwards those of
        before."""
        raise NotImplementedError

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model trains in general but not in the current step. A backward may end before
        it reaches a site."""
        return frozenset()

    @property
    def work_shares(self) -> tuple[float, ...]:
        """Shares that the FLOPs of the last training pass follow, each between 0 and 1, such as that of blocks with a
        backward; equally many at all times."""
        return ()

    @property
    def gradient_bytes(self) -> int | None:
        """Bytes of the gradients of a training step, if they are smaller than those that a probe shows; None: not."""
        return None

    @property
    def trains_frozen(self) -> bool:
        """Whether weights that the user froze are trained, so that adapters alone are not the model."""
        return False

    @property
    def uncharged_comparisons(self) -> int:
        """Comparisons with the plain step so far that no measurement of a step shows; each is a plain pass and one of
        its own."""
        return 0

    @property
    def left_out(self) -> float:
        """FLOPs that the last forward took from what an earlier one had computed."""
        return 0.0

    def take_use(self) -> OutputUse | None:
        """Return what training forwards have used of kept outputs since the last call; None: nothing is kept."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return entries that a resumed run needs, under names that no other extension uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore its own entries from the engine's state."""


ALWAYS = {"install", "remove", "enable", "start_step"}
HOOKS = frozenset(name for name in vars(EngineExtension) if not name.startswith("_")) - ALWAYS - {"hooks"}


class PassRunner(EngineExtension):
    """An extension that runs the backward pass itself and changes parameters during it."""

    report: EagerReport | None
    counting: UpdateFlops | None  # counts the updates of the coming pass

    @property
    def gradient_norm(self) -> float:
        """2-norm of all gradients of the last pass that updated, before they were clipped; 0 before the first."""
        raise NotImplementedError

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
        raise NotImplementedError


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
