"""Phases in any training loop: policies that are replaced by others at a step, by one engine after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, Self, TypedDict, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparsebp_cli.backward.attachment import attach, validates
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
    """A phase as a recipe's ``schedule`` has it.

    Attributes:
        policy: Its policies, as for :func:`sparsebp_cli.attach`; none is dense.
        until: Share of the training at which it ends, in (0, 1); the last phase has none.
    """

    policy: PolicyLike | Sequence[PolicyLike]
    until: NotRequired[float | None]


Schedule = Sequence[tuple[float | None, tuple[Policy, ...]]]
Attach = Callable[[Sequence[Policy]], tuple[Engine, Callable[[], None]]]  # an engine, and what detaches it


def make_schedule(given: Sequence[Phase]) -> Schedule:
    """Make the policies of phases. Raise UsageError if the phases cannot follow one another."""
    if len(given) < 2:
        raise UsageError(f"schedule: needs 2 phases or more, got {len(given)}; attach takes the policies of one")
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
    """Raise UnsupportedError for the first thing that cannot change in the middle of a training."""
    facts: dict[str, object] = {"phases": len(schedule), "processes": count_processes(model)}
    if any(has_fsdp_state(module) for module in model.modules()):
        facts["sharding"] = "fsdp2"
    if "_orig_mod" in dict(model.named_children()):
        facts["wrapped"] = "compiled"
    for _, policies in schedule:
        refuse(Setup([PolicyFacts.of(policy) for policy in policies], facts, words={"processes": SEVERAL}))


@final
class PhasedEngine:
    """The engine of each phase in turn. Created by :func:`attach_phases`.

    The policies are replaced at the end of the optimizer's step before a phase. Their states begin anew; optimizer,
    step number and the counts of the report go on.

    Args:
        phases: Phases of the training, the first one first.
        attach: Attaches the policies of a phase; returns the engine and a function that detaches it.
        optimizer: Its steps end the phases.

    Attributes:
        phases: The phases of the training, the first one first.
        engine: The engine of the phase that makes the next step. It is another one in each phase: do not keep it.
    """

    phases: Sequence[PolicyPhase[Policy]]
    engine: Engine

    def __init__(
        self, phases: Sequence[PolicyPhase[Policy]], attach: Attach, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.phases, self._attach, self._phase = phases, attach, phases[0]
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        self.engine, self._remove = attach(phases[0].policies)
        # A hook on the optimizer itself could not add and remove others; those for all optimizers run after them.
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
        """Return the state of the current phase's engine, from which :meth:`load_state_dict` goes on in this phase."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, and attach the policies of its phase.

        Args:
            state: What :meth:`state_dict` returned for the same schedule.

        Raises:
            UsageError: It is no such state.
        """
        index = state.get("index")
        if type(index) is not int or index < 0:
            raise UsageError(f"not a state of the engine: {dict(state)!r}")
        phase = self.phases[find_phase(self.phases, index)]
        if phase is not self._phase:
            self._replace(phase)
        self.engine.load_state_dict(state)

    def detach(self) -> None:
        """Restore the model as it was before. Further calls do nothing."""
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
            # What policies remember begins with their phase; the step's number and the like go on. See decision 103.
            self.engine.follow(before, state, step)

    def _replace(self, phase: PolicyPhase[Policy]) -> None:
        self._remove()
        self.engine, self._remove = self._attach(phase.policies)
        self._phase = phase


def attach_phases(  # noqa: PLR0913 - those of attach
    model: nn.Module,
    schedule: Sequence[Phase],
    *,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    num_examples: int | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    reference: nn.Module | Literal["batch"] | None = None,
    validation: Mapping[str, Tensor] | None = None,
    folder: str | Path | None = None,
    **choices: Unpack[BackwardChoices],
) -> PhasedEngine:
    """Let other policies decide in each phase of a training, as ``schedule`` does in a recipe.

    Each phase is attached and detached once before the first begins, so what does not fit the model is refused here.

    Args:
        model: As for :func:`attach`.
        schedule: Two or more phases, such as ``[{"until": 0.4, "policy": "dense"}, {"policy": [topk]}]``. A phase ends
            at the step that is nearest to its share of ``num_steps``.
        optimizer: Its steps end the phases.
        num_steps: Optimizer steps of the whole training, at least 1.
        num_examples: As for :func:`attach`.
        max_grad_norm: As for :func:`attach`.
        seed: As for :func:`attach`.
        reference: As for :func:`attach`; one for all phases that compare.
        validation: As for :func:`attach`; one for all phases that compare gradients with it.
        folder: As for :func:`attach`; one for all phases.
        **choices: As for :func:`attach`, the same in all phases.

    Returns:
        What runs the backward passes; as a context manager it detaches at the end.

    Raises:
        PolicyError: As :func:`attach`, for a policy of any phase.
        UnsupportedError: As :func:`attach`, or something that cannot change in the middle of a training.
        UsageError: As :func:`attach`, or the phases cannot follow one another, or one has no step.
    """
    made = make_schedule(schedule)

    def attach_policies(policies: Sequence[Policy]) -> tuple[Engine, Callable[[], None]]:
        refuse_phases(made, model)  # sharding or compilation may have come after the first phase
        engine = attach(
            model,
            policies,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            seed=seed,
            num_steps=num_steps,
            num_examples=num_examples,
            reference=reference if needs_reference(policies, made, reference) else None,
            validation=validation if _is_wanted(policies, made, validates) else None,
            folder=folder,
            **choices,
        )
        return engine, engine.detach

    phases = lay_out_schedule(made, num_steps)
    try_phases(made, attach_policies)
    return PhasedEngine(phases, attach_policies, optimizer)


def lay_out_schedule(schedule: Schedule, num_steps: int) -> list[PolicyPhase[Policy]]:
    """Return the phases of a training. Raise UsageError if it is too short for one of them."""
    phases = lay_out((), schedule, num_steps)
    for number, text in find_empty(phases, "num_steps"):
        raise UsageError(f"schedule.{number}.until: {text}")
    return phases


def try_phases(schedule: Schedule, attach: Attach) -> None:
    """Attach and detach each phase, to raise what is wrong with it before the training begins."""
    for _, policies in schedule:
        _, remove = attach(policies)
        remove()


def needs_reference(policies: Sequence[Policy], schedule: Schedule, reference: object = None) -> bool:
    """Return whether a reference belongs to a phase with these policies: if they compare with it, or act on its
    forwards, or if no phase does, so that it is refused."""
    return _is_wanted(policies, schedule, _runs if isinstance(reference, nn.Module) else _compares)


def _is_wanted(policies: Sequence[Policy], schedule: Schedule, reads: Callable[[Policy], bool]) -> bool:
    return any(map(reads, policies)) or not any(any(map(reads, others)) for _, others in schedule)


def _compares(policy: Policy) -> bool:
    return isinstance(policy, ReferenceReader) and policy.reads_reference


def _runs(policy: Policy) -> bool:
    return _compares(policy) or bool(find_facts(policy).get("runs_reference"))
