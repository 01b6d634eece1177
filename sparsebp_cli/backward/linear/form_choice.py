"""Choice of the form in which a selected product is computed, by what was timed once.

Which entries of a gradient are kept is the policy's decision and does not depend on this. A form that was not faster
than masking the gradient and multiplying densely, at a shape and a share kept, is not used. What was timed is part of
the engine's state, so a resumed training computes as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from torch import distributed, nn

from sparsebp_cli.backward.core.scope import Scope
from sparsebp_cli.backward.linear.function import WeightLayout, weight_of
from sparsebp_cli.backward.linear.timing import MOST_SECONDS, Masked, TimedCase, Timer, shape_of, time_all
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import (
    Blocks,
    Budget,
    Columns,
    Elements,
    GradientSelector,
    InformedSelector,
    Rows,
    Selection,
    Site,
    Split,
    Step,
    TwoToFour,
)
from sparsebp_cli.run.break_even import FormTimes, FormUse, describe_use

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.engine import Engine
    from sparsebp_cli.backward.core.extension import EngineView

STATE = "form_times"  # its entry in the engine's state
KINDS: tuple[type[Selection], ...] = (Rows, Columns, Blocks, Elements, TwoToFour)
# Shares that are timed where a policy keeps another one from site to site or step to step.
SHARES = (0.1, 0.25, 0.5, 0.75)
FEW_SHARES = (0.005, 0.02, 0.04)  # of single entries, which have a form only below function.CSR_BELOW

Limits = Mapping[type[Selection], float]  # the share from which on a kind of selection is masked


def mask_slower(selection: Selection | Split | None, limits: Limits, budget: Budget) -> Selection | Split | None:
    """Return a selection in the form in which it is multiplied; ``budget`` is the share that the policy declares."""
    if isinstance(selection, Split):
        dgrad, wgrad = _mask(selection.dgrad, limits, budget.dgrad), _mask(selection.wgrad, limits, budget.wgrad)
        return Split(dgrad, wgrad, selection.full_bias)
    return _mask(selection, limits, max(budget.dgrad, budget.wgrad))


def _mask(selection: Selection | None, limits: Limits, budget: float) -> Selection | None:
    # A kind without a limit has one that no share reaches.
    if selection is None or budget < limits.get(type(selection), 2.0):
        return selection
    return Masked(selection)


class Covered(Protocol):
    """A linear adapter, as far as it says which linears there are."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """The covered linears as sites, before any batch."""

    @property
    def linears(self) -> Mapping[str, tuple[nn.Module, WeightLayout]]:
        """Module and layout of each, by name."""


class _Kind(NamedTuple):
    """A kind of selection that a policy makes."""

    kind: type[Selection]
    share: float  # that is kept
    varies: bool  # whether other sites or steps have other shares


@final
class FormChoice:
    """The choice of forms in one model, as an :class:`~sparsebp_cli.backward.core.extension.EngineExtension`."""

    times: FormTimes | None  # None: nothing was timed yet

    def __init__(self) -> None:
        self.times = None
        self._adapter: Covered | None = None
        self._selectors: Sequence[GradientSelector] = ()
        self._num_layers = 0
        self._limits: dict[tuple[int, int], Limits] = {}

    def cover(self, adapter: Covered, selectors: Sequence[GradientSelector], num_layers: int) -> None:
        """Set the linears, and the policies that decide at them; ``num_layers`` is 0 if layers are not known."""
        self._adapter, self._selectors, self._num_layers = adapter, selectors, num_layers

    def limits_at(self, num_outputs: int, num_inputs: int) -> Limits:
        """Return the share from which on each kind of selection is masked, at a linear of this shape."""
        shape = num_outputs, num_inputs
        if shape not in self._limits:
            found = [(kind, (self.times or FormTimes()).find(kind.__name__, *shape)) for kind in KINDS]
            self._limits[shape] = {kind: one.limit for kind, one in found if one is not None}
        return self._limits[shape]

    def check(self) -> FormTimes | None:
        """Return what was timed. Raise UsageError if nothing was, so that it is open which forms are used."""
        if self.times is None and self._selectors:
            raise UsageError(
                "attach(time_forms=True) needs sparsebp_cli.time_forms(engine, num_rows=...) before the first "
                "backward, or a state in which forms were timed"
            )
        return self.times

    def measure(
        self,
        num_rows: int,
        *,
        policies: Sequence[GradientSelector] | None = None,
        timer: Timer | None = None,
        most_seconds: float = MOST_SECONDS,
        tell: Callable[[str], None] = lambda _: None,
    ) -> FormTimes:
        """Time what is not known yet, for the attached policies or for those of all phases. Where several processes
        train together the first one times, and all take what it found.
        """
        known = self.times or FormTimes()
        if _is_first():
            cases = [case for case in self._find_cases(policies) if known.find(*case.key) is None]
            if cases:
                tell(f"timing {len(cases)} forms of products at linears, for at most {most_seconds:g} s")
            known = FormTimes((*known.timed, *time_all(cases, num_rows, timer, most_seconds)))
        known = _from_first(known)
        self.set(known)
        return known

    def set(self, times: FormTimes) -> None:
        """Let these times decide from now on."""
        self.times = times
        self._limits.clear()

    def uses(self, policies: Sequence[GradientSelector] | None = None) -> Iterator[FormUse]:
        """Yield the forms that policies select, linear by linear."""
        for _, (kind, share, varies), name, module, form in self._walk(policies):
            if _shares(kind, share, form, varies=varies):
                yield FormUse(name, kind.__name__, *shape_of(module, form), None if varies else share)

    def _find_cases(self, policies: Sequence[GradientSelector] | None) -> list[TimedCase]:
        cases: dict[tuple[str, int, int], TimedCase] = {}
        for policy, (kind, share, varies), _, module, form in self._walk(policies):
            shares = _shares(kind, share, form, varies=varies)
            if shares:
                case = TimedCase(kind, module, form, policy)
                case = cases.setdefault(case.key, case)
                case.trains |= weight_of(module).requires_grad
                case.shares |= shares
        return list(cases.values())

    def _walk(
        self, policies: Sequence[GradientSelector] | None
    ) -> Iterator[tuple[GradientSelector, _Kind, str, nn.Module, WeightLayout]]:
        if self._adapter is None:  # the policies do not decide at linears
            return
        for policy in self._selectors if policies is None else policies:
            scope = Scope(policy, self._num_layers)
            for kind in _kinds_of(policy):
                for site in self._adapter.sites:
                    if scope.contains(site.name, site.layer):
                        yield policy, kind, site.name, *self._adapter.linears[site.name]

    # As an extension: what was timed is an entry of the engine's state.

    def install(self, engine: EngineView) -> None:
        """Do nothing: linears ask for the limits."""

    def remove(self) -> None:
        """Do nothing: no module was changed."""

    def enable(self, enabled: bool) -> None:
        """Do nothing: without policies nothing is selected."""

    def start_step(self, step: Step) -> None:
        """Do nothing: the times hold for the whole training."""

    def state_dict(self) -> dict[str, Any]:
        return {STATE: None if self.times is None else self.times.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state[STATE] is not None:
            try:
                self.set(FormTimes.from_json(state[STATE]))
            except ValueError as error:
                raise UsageError(f"not a state of the engine: {error}") from None


def find_choice(engine: Engine) -> FormChoice | None:
    """Return what chooses the forms of an engine; None unless it was attached with ``time_forms``."""
    return next((part for part in engine.extensions if isinstance(part, FormChoice)), None)


def time_forms(engine: Engine, *, num_rows: int, tell: Callable[[str], None] = lambda _: None) -> FormTimes:
    """Time the forms of the selected products once, before the first backward of a model that was attached with
    ``time_forms=True``. A form that is not faster than masking and multiplying everything is not used afterwards.

    Call it under autocast if the training runs under it. Where several processes train together, all call it, the first
    one times, and all take what it found. ``engine.state_dict()`` contains the result.

    Args:
        engine: An engine that :func:`attach` returned with ``time_forms=True``.
        num_rows: Rows of a training step's gradients, examples times positions, at least 1.
        tell: Called with a sentence before anything is timed, and with the result.

    Returns:
        What was timed.

    Raises:
        UsageError: The engine times no forms, or ``num_rows`` is less than 1.
    """
    choice = find_choice(engine)
    if choice is None:
        raise UsageError("time_forms needs an engine from attach(time_forms=True)")
    if num_rows < 1:
        raise UsageError(f"num_rows must be at least 1, got {num_rows}")
    times = choice.measure(num_rows, tell=tell)
    tell(str(describe_use(times, choice.uses())["text"]))
    return times


def _kinds_of(policy: GradientSelector) -> list[_Kind]:
    budget = Budget.of(policy.budget)
    varies = bool(policy.schedules or policy.keep_warmup_steps or budget.is_mean)
    varies = varies or type(policy).budget_at is not GradientSelector.budget_at
    split = policy.split if isinstance(policy, InformedSelector) else None
    if split is None:
        found = [(policy.selection, max(budget.dgrad, budget.wgrad))]
    else:
        found = [(split.dgrad, budget.dgrad), (split.wgrad, budget.wgrad)]
    return [_Kind(kind, share, varies) for kind, share in dict.fromkeys(found) if kind is not None and kind in KINDS]


def _shares(kind: type[Selection], share: float, form: WeightLayout, *, varies: bool) -> set[float]:
    """Return the shares to be timed: those at which this kind has a form that multiplies less."""
    wanted = {share, *(FEW_SHARES if kind is Elements else SHARES)} if varies else {share}
    if kind is TwoToFour:  # the same number of operations, at a higher rate
        return wanted
    return {one for one in wanted if form.share(kind, one) < 1.0}


def _is_first() -> bool:
    return not _is_together() or distributed.get_rank() == 0


def _from_first(times: FormTimes) -> FormTimes:
    """Return what the first process found."""
    if not _is_together():
        return times
    values = [times.to_json()]
    distributed.broadcast_object_list(values)
    return FormTimes.from_json(values[0])


def _is_together() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
