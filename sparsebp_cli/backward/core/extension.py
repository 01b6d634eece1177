"""Base classes and protocols of site adapters and engine extensions, and the views of the engine that both receive.

Adapters and extensions depend on these classes instead of the engine, so that imports run in one direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol

from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsebp_cli.backward.core.report import Chosen, EagerReport, FlopEstimate, Route
    from sparsebp_cli.policy import GradientSelector, Policy, Reading, Seen, Selection, Site, Split, Step

    Share = tuple[type[Selection] | None, float]


@dataclass
class ShortForward:
    """A forward that runs only some positions or examples of a batch."""

    num_rows: int | None = None  # positions of the whole batch, B*T; None: the forward runs all positions
    scale: float = 1.0  # examples of the batch over examples that run
    called: set[str] = field(default_factory=set)  # linears that have run in this forward


class EngineView(Protocol):
    """The part of the engine that an extension uses."""

    enabled: bool  # whether policies are active
    reference: bool  # whether to mask gradients, then multiply densely
    notes: dict[str, str]  # sentences for the report on how the engine executes policies, by topic
    batch_sizes: frozenset[int] | None  # candidates, from the last forward; empty: unknown; None: not needed
    dense_rows: int | None  # B*T of the last batch in which a compiled graph ran only some positions; None: no batch

    @property
    def is_probing(self) -> bool:
        """Whether the running pass is a probe, which trains nothing."""

    def now(self) -> Step:
        """Return the step of the running backward, or of the next one."""

    def probing(self, draw: int = 1) -> AbstractContextManager[None]:
        """Return a context in which the engine applies the policy without side effects."""

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context in which passes are dense and sites count nothing."""

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context that scales the counts at sites during a forward that skips positions or examples."""

    def add_chosen(self, chosen: Chosen) -> None:
        """Add the counts of a choice before a forward."""

    def add_route(self, route: Route) -> None:
        """Add the route of one backward."""


class Decisions(Protocol):
    """Decisions about the gradients that arrive at sites."""

    has_selectors: bool  # whether there is a policy that decides

    def check_inside(self) -> None:
        """Refuse a backward that does not run through the engine."""

    def decide(self, site: Site, seen: Seen, work: SiteCost, dense_rows: int | None = None) -> Selection | Split | None:
        """Return the selection of a gradient, a ``Split`` at linears alone; None keeps everything."""

    def reads_at(self, site: Site) -> frozenset[Reading]:
        """Return the tensors that the policy at a site reads besides the gradient."""


class SiteEngine(EngineView, Protocol):
    """The part of the engine that a site uses: sites also request decisions."""

    @property
    def decisions(self) -> Decisions:
        """The object that decides about gradients."""

    forward: ShortForward | None  # the current forward, if it skips positions or examples

    def policy_at(self, site: Site) -> GradientSelector | None:
        """Return the policy that decides at a site in the current or next backward; None: the site stays dense."""


class SiteAdapter(ABC):
    """Installs an engine at the sites of one kind in one model."""

    names: tuple[str, ...]  # sites known before the first backward, in the model's order
    not_covered: tuple[str, ...]  # modules of this kind with a custom forward: their backward stays dense
    excluded: tuple[str, ...]  # modules that the user excluded

    @abstractmethod
    def install(self, engine: SiteEngine) -> None:
        """Override modules so that their sites call this engine."""

    @abstractmethod
    def remove(self) -> None:
        """Restore the model."""

    @abstractmethod
    def backward_context(self, loss: Tensor) -> AbstractContextManager[Tensor | None]:
        """Return the context in which the backward of ``loss`` runs. If it yields a tensor, the engine differentiates
        that instead.
        """


class SiteCost(ABC):
    """The dense FLOPs of one site in one backward, and the estimate of the part that a policy executes."""

    @abstractmethod
    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return dense and estimated FLOPs for a type of selection, None for dense, and a kept fraction in (0, 1]."""


class SplitCost(SiteCost):
    """The FLOPs of a site at which a policy may select dgrad and wgrad separately."""

    @abstractmethod
    def claim_split(self, dgrad: Share, wgrad: Share) -> FlopEstimate:
        """Return dense and estimated FLOPs for the type of selection and the kept fraction of each product."""


class EngineExtension:
    """The base class of code that executes a kind of policy inside the engine.

    The engine calls every hook; the hooks of this class do nothing. A subclass must mark the hooks that it defines with
    ``typing_extensions.override``, except the first four. A method that has a hook's name by accident would change the
    engine's behaviour, so defining one without the mark raises :class:`TypeError`.
    """

    hooks: ClassVar[frozenset[str]] = frozenset()  # names of the hooks that the class or one of its bases defines

    def __init_subclass__(cls, **options: object) -> None:
        """Set ``hooks`` of a subclass. Raise TypeError for a hook without the mark."""
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
        """Change the model. ``engine.now()`` is the step; ``engine.enabled`` says whether policies are active."""

    def remove(self) -> None:
        """Restore the model."""

    def enable(self, enabled: bool) -> None:
        """Activate the policy, or let the model run as without it."""

    def start_step(self, step: Step) -> None:
        """Prepare for an optimizer step. The engine calls this at attach, after each optimizer step, and on resume."""

    def set_columns(self, **columns: Tensor) -> None:
        """Set columns of the batch that the model's forward does not receive. They stay set until the next call."""

    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Refuse unsupported arguments of the model's forward by name, before training."""

    def reading_by(self, labels: Tensor | None, reads: Literal["labels", "loss"]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which the script reads only the declared outputs of forwards without gradient."""
        return nullcontext()

    def expect(self, batches: Sequence[Mapping[str, Any]]) -> bool:  # noqa: ARG002
        """Receive the arguments of the coming forwards of one step; return whether they share a prefix."""
        return False

    def refreeze(self) -> None:
        """Freeze again what the policy does not train at this step. A script or peft's disable_adapter() may have set
        ``requires_grad`` since the step began."""

    def finish_pass(self) -> None:
        """Finish the backward of a micro-batch, such as the backward of data that it was the last to read."""

    def check_called(self) -> None:
        """Refuse a backward if the policy has not been called in a forward since the model was attached."""

    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the estimated FLOPs under the policy at the current step, given a dense pass on the same batch."""
        raise NotImplementedError

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model trains in general but not in the current step. With them, a backward may
        end before it reaches a site."""
        return frozenset()

    @property
    def work_shares(self) -> tuple[float, ...]:
        """Fractions in [0, 1] that determine the FLOPs of the last training pass, such as the fraction of blocks with a
        backward. Their number never changes."""
        return ()

    @property
    def gradient_bytes(self) -> int | None:
        """Bytes of the gradients of a training step, if they are fewer than a probe measures; None otherwise."""
        return None

    @property
    def trains_frozen(self) -> bool:
        """Whether the policy trains weights that the user froze, so that saving adapters alone would lose changes."""
        return False

    @property
    def uncharged_comparisons(self) -> int:
        """Number of comparisons with the plain step so far that no probe measures. Each costs a plain pass and another
        pass of the extension."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return entries that a resumed run needs, under names that no other extension uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this extension's entries from the engine's state."""


ALWAYS = {"install", "remove", "enable", "start_step"}
HOOKS = frozenset(name for name in vars(EngineExtension) if not name.startswith("_")) - ALWAYS - {"hooks"}


class PassRunner(EngineExtension):
    """An extension that runs the backward pass itself and changes parameters during it."""

    report: EagerReport | None
    counting: UpdateFlops | None  # counts the updates of the coming pass

    @property
    def gradient_norm(self) -> float:
        """2-norm of all gradients of the last pass that updated, before clipping; 0 before the first such pass."""
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

        ``backward`` is the user's function that runs a pass, None for ``torch.Tensor.backward``. Without ``updates`` no
        parameter changes and gradients stay in ``.grad``.
        """
        raise NotImplementedError


def name_parameters(model: nn.Module, adapter: SiteAdapter) -> dict[int, str]:
    """Return the names of parameters by ``id``. For a shared parameter, prefer a name in a module that the report lists
    as excluded or not covered.
    """
    listed = {*adapter.not_covered, *adapter.excluded}
    names = list(model.named_parameters(remove_duplicate=False))
    names.sort(key=lambda pair: pair[0].rpartition(".")[0] in listed)
    return {id(p): name for name, p in names}


def trains_at_sites(model: nn.Module, adapter: SiteAdapter) -> bool:
    """Return whether a site has trained weights, so that a loss of this model must depend on it. This is not so if only
    adapters are trained and the user excluded them.
    """
    modules = dict(model.named_modules())
    sites = (modules[name] for name in adapter.names if name in modules)
    return any(p.requires_grad for module in sites for p in module.parameters())


def refuse_uncalled(policy: Policy, model: nn.Module) -> NoReturn:
    """Raise :class:`UsageError`: a backward ran, but no forward of the model called the policy."""
    if not model.training:
        raise UsageError(
            f"{type(policy).__name__} was not called: {type(model).__name__} is in eval mode, as from_pretrained "
            "returns it, and this policy acts only in training; call model.train() before the loop, and after each "
            "evaluation"
        )
    raise UsageError(
        f"{type(policy).__name__} was not called: no training forward of {type(model).__name__} ran before the "
        "backward: call model(...) itself, not only parts of it, nor a model.forward that was stored before attach()"
    )
