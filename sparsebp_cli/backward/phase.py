"""Phases in any training loop: at given steps, new policies in a new engine replace the previous ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, Self, TypedDict, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparsebp_cli.backward.attachment import attach
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.process import SEVERAL, count_processes
from sparsebp_cli.backward.core.report import Report
from sparsebp_cli.backward.observe.internals import has_fsdp_state
from sparsebp_cli.composition import BackwardChoices, PolicyFacts, Setup, refuse
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Policy, PolicyLike, ReferenceReader, make_policies
from sparsebp_cli.policy.known_kind import find_facts
from sparsebp_cli.run.policy_phase import PolicyPhase, find_empty, find_phase, find_wrong_end, lay_out


class Phase(TypedDict):
    """One phase of a training: its policies and the fraction of the steps at which it ends.

    Attributes:
        policy: Its policies, as for :func:`sparsebp_cli.attach`; without policies the phase is dense.
        until: Fraction of the training at which it ends, in (0, 1). Leave it out in the last phase.
    """

    policy: PolicyLike | Sequence[PolicyLike]
    until: NotRequired[float | None]


Schedule = Sequence[tuple[float | None, tuple[Policy, ...]]]
Attach = Callable[[Sequence[Policy]], tuple[Engine, Callable[[], None]]]  # an engine, and a function that detaches it


def make_schedule(given: Sequence[Phase]) -> Schedule:
    """Make the policies of phases. Raise UsageError if the phases cannot follow one another."""
    if len(given) < 2:
        raise UsageError(f"schedule: needs 2 phases or more, got {len(given)}; for one phase call attach")
    made: list[tuple[float | None, tuple[Policy, ...]]] = []
    for number, phase in enumerate(given):
        unknown = set(phase) - {"policy", "until"} if isinstance(phase, Mapping) else {repr(phase)}
        if unknown or "policy" not in phase:
            got = f"got {min(unknown)}" if unknown else "policy is missing"
            raise UsageError(f"schedule.{number}: a phase is a mapping with policy and until, {got}")
        until = phase.get("until")
        if until is not None and (isinstance(until, bool) or not isinstance(until, int | float) or not 0 < until < 1):
            raise UsageError(f"schedule.{number}.until: must be a share of the training in (0, 1), got {until!r}")
        made.append((until, make_policies(phase["policy"])))
    wrong = find_wrong_end([until for until, _ in made])
    if wrong is not None:
        raise UsageError(f"schedule.{wrong[0]}: {wrong[1]}")
    return made


def refuse_phases(schedule: Schedule, model: nn.Module) -> None:
    """Raise UnsupportedError for the first policy or option that does not support a change during training."""
    facts: dict[str, object] = {"phases": len(schedule), "processes": count_processes(model)}
    if any(has_fsdp_state(module) for module in model.modules()):
        facts["sharding"] = "fsdp2"
    if "_orig_mod" in dict(model.named_children()):
        facts["wrapped"] = "compiled"
    for _, policies in schedule:
        refuse(Setup([PolicyFacts.of(policy) for policy in policies], facts, words={"processes": SEVERAL}))


@final
class PhasedEngine:
    """An engine whose policies change from phase to phase. Created by :func:`attach_phases`.

    At the end of the last optimizer step of a phase, the policies of the next phase replace its policies and start with
    new states. Optimizer, step number and the counts of the report continue.

    Args:
        phases: Phases of the training, in their order.
        attach: Attaches the policies of a phase; returns the engine and a function that detaches it.
        optimizer: Its steps end the phases.

    Attributes:
        phases: The phases of the training, in their order.
        engine: The engine of the phase that makes the next step. Each phase has a new engine, so do not store it.
    """

    phases: Sequence[PolicyPhase[Policy]]
    engine: Engine

    def __init__(
        self, phases: Sequence[PolicyPhase[Policy]], attach: Attach, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.phases, self._attach, self._phase = phases, attach, phases[0]
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        self.engine, self._remove = attach(phases[0].policies)
        # A hook on the optimizer could not add and remove its other hooks. Hooks for all optimizers run after those.
        self._handle = register_optimizer_step_post_hook(self._end_step) if len(phases) > 1 else None

    @property
    def phase(self) -> PolicyPhase[Policy]:
        """The phase that makes the next step."""
        return self._phase

    def backward(
        self,
        loss: Tensor,
        backward: Callable[..., object] | None = None,
        *,
        is_last: bool = True,
        loss_scale: float | Tensor | None = None,
    ) -> None:
        """Run the backward pass with the policies of the current phase.

        Args:
            loss: One number with a graph, as for ``loss.backward()``.
            backward: As for :meth:`Engine.backward`.
            is_last: As for :meth:`Engine.backward`.
            loss_scale: As for :meth:`Engine.backward`.
        """
        self.engine.backward(loss, backward, is_last=is_last, loss_scale=loss_scale)

    def report(self) -> Report:
        """Return what happened at every site in all phases so far; synchronises with the device."""
        return self.engine.report()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current phase's engine, for :meth:`load_state_dict`."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, and attach the policies of its phase.

        Args:
            state: A result of :meth:`state_dict` with the same schedule.

        Raises:
            UsageError: ``state`` is not such a result.
        """
        index = state.get("index")
        if type(index) is not int or index < 0:
            raise UsageError(f"the loaded state is not a state of an engine: {dict(state)!r}")
        phase = self.phases[find_phase(self.phases, index)]
        if phase is not self._phase:
            self._replace(phase)
        self.engine.load_state_dict(state)

    def detach(self) -> None:
        """Restore the model to its state before ``attach_phases``. Further calls do nothing."""
        if self._handle is not None:
            self._handle.remove()
        self._remove()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer:
            return
        step = self.engine.now().index
        phase = self.phases[find_phase(self.phases, step)]
        if phase is not self._phase:
            before, state = self.engine, self.engine.state_dict()
            self._replace(phase)
            # Policies' states start anew in each phase; the step's number and other entries continue. See decision 103.
            self.engine.follow(before, state, step)

    def _replace(self, phase: PolicyPhase[Policy]) -> None:
        self._remove()
        self.engine, self._remove = self._attach(phase.policies)
        self._phase = phase


def attach_phases(
    model: nn.Module,
    schedule: Sequence[Phase],
    *,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    max_grad_norm: float | None = None,
    seed: int = 0,
    reference: nn.Module | Literal["batch"] | None = None,
    **choices: Unpack[BackwardChoices],
) -> PhasedEngine:
    """Attach policies that change from phase to phase of the training, like ``schedule`` in a recipe.

    The function attaches and detaches each phase once, so that phases that do not fit the model raise errors here.

    Args:
        model: As for :func:`attach`.
        schedule: Two or more phases, such as ``[{"until": 0.4, "policy": "dense"}, {"policy": [topk]}]``. A phase ends
            at the step that is nearest to the fraction ``until`` of ``num_steps``.
        optimizer: Its steps end the phases.
        num_steps: Optimizer steps of the whole training, at least 1.
        max_grad_norm: As for :func:`attach`.
        seed: As for :func:`attach`.
        reference: As for :func:`attach`; the same for all phases that compare with it.
        **choices: As for :func:`attach`, the same in all phases.

    Returns:
        The engine that runs the backward passes; as a context manager it detaches at the end.

    Raises:
        PolicyError: As :func:`attach`, for a policy of any phase.
        UnsupportedError: As :func:`attach`, or a policy or option does not support a change during training.
        UsageError: As :func:`attach`, or the phases cannot follow one another, or a phase has no step.
    """
    made = make_schedule(schedule)

    def attach_policies(policies: Sequence[Policy]) -> tuple[Engine, Callable[[], None]]:
        refuse_phases(made, model)  # the model may have been sharded or compiled since the first phase
        engine = attach(
            model,
            policies,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            seed=seed,
            num_steps=num_steps,
            reference=reference if needs_reference(policies, made, reference) else None,
            **choices,
        )
        return engine, engine.detach

    phases = lay_out_schedule(made, num_steps)
    try_phases(made, attach_policies)
    return PhasedEngine(phases, attach_policies, optimizer)


def lay_out_schedule(schedule: Schedule, num_steps: int) -> list[PolicyPhase[Policy]]:
    """Return the phases of a training. Raise UsageError if the training is too short for one of them."""
    phases = lay_out((), schedule, num_steps)
    for number, text in find_empty(phases, "num_steps"):
        raise UsageError(f"schedule.{number}.until: {text}")
    return phases


def try_phases(schedule: Schedule, attach: Attach) -> None:
    """Attach and detach each phase, so that its errors appear before the training begins."""
    for _, policies in schedule:
        _, remove = attach(policies)
        remove()


def needs_reference(policies: Sequence[Policy], schedule: Schedule, reference: object = None) -> bool:
    """Return whether to pass the reference to a phase with these policies: if they compare with it or act on its
    forwards. If no phase does, return True, so that ``attach`` refuses the reference."""
    return _is_wanted(policies, schedule, _runs if isinstance(reference, nn.Module) else _compares)


def _is_wanted(policies: Sequence[Policy], schedule: Schedule, reads: Callable[[Policy], bool]) -> bool:
    return any(map(reads, policies)) or not any(any(map(reads, others)) for _, others in schedule)


def _compares(policy: Policy) -> bool:
    return isinstance(policy, ReferenceReader) and policy.reads_reference


def _runs(policy: Policy) -> bool:
    return _compares(policy) or bool(find_facts(policy).get("runs_reference"))
