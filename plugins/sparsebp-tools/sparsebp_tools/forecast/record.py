"""What a recipe would take: its memory, FLOPs and time, before anything of it is loaded. Plain data."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from sparsebp_cli.plan.plan import Plan

ROOM = 0.9  # of the memory: the rest is for the allocator's gaps and for what is not counted
# What a process on a CPU held at most, of what is counted: 3.11 GB of 1.32 GB, with a base of 4 bits, which is saved as
# numbers (SmolLM2-135M, torch 2.13, 2026-11-28).
HELD_ON_CPU = 2.4
Fit = Literal["fits", "tight", "does not fit"]


class _Record(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class ForecastRequest(_Record):
    """What the client asks.

    Args:
        plan: The recipe, with absolute paths.
        gpu: Whether it is to run on a GPU; False: on this machine's CPU.
        capacity_bytes: The memory of the device; None: what this machine has left.
        flops_per_second: A rate that was given or measured; None: the worker measures products on this machine, or
            with ``gpu`` there is none.
        remedies: Whether to try what would need less.
    """

    plan: Plan
    gpu: bool
    capacity_bytes: int | None = None
    flops_per_second: float | None = None
    remedies: bool = True


class Parts(_Record):
    """Bytes by purpose at one moment. ``logits`` are taken out of activations and workspace: they, their gradients and
    what the loss makes of them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspace


class StepForecast(_Record):
    """A step of one arm.

    Args:
        policy: What the policies are called.
        phases: The peak of each phase that the step has.
        pass_flops: Of forward and backward over the largest micro-batch.
        attention_flops: Of these, what grows with the square of the length.
        update_flops: Of the optimizer's update.
        gradient_bytes: Of all gradients of a step, whether they are kept or not.
        num_parameters: Of the model, adapters included.
        num_trained: Of these, the parameters that this arm trains.
        comparison: The peak of a step in which the policy compares itself with the plain one; None if it never does, or
            always.
        trial: The peak of the trial passes that a policy wants before some step; None without any.
    """

    policy: str
    phases: dict[Literal["forward", "backward", "update"], Parts]
    pass_flops: float
    attention_flops: float
    update_flops: float
    gradient_bytes: int
    num_parameters: int
    num_trained: int
    comparison: Parts | None = None
    trial: Parts | None = None

    @property
    def peak_phase(self) -> Literal["forward", "backward", "update"]:
        """The phase with the highest peak; the first of several."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def peak(self) -> Parts:
        """The parts at the highest moment of a step."""
        return self.phases[self.peak_phase]

    @property
    def largest_bytes(self) -> int:
        """The peak of the steps, those included that compare themselves with the plain one, and of trial passes."""
        return max(parts.total for parts in (self.peak, self.comparison, self.trial) if parts is not None)

    @property
    def probe_bytes(self) -> int:
        """The peak of a probe, estimated: passes as in a step, beside the gradients of both arms."""
        passes = max(parts.total for phase, parts in self.phases.items() if phase != "update")
        return passes + 2 * self.gradient_bytes


class BatchForecast(_Record):
    """The largest micro-batch, and the mean work of all.

    Args:
        examples: In it.
        length: Its positions, padded.
        trained_share: Of its positions, those with a label.
        scale: Work of the mean micro-batch over that of the largest.
        is_read: Whether it is one of the recipe's own data; False: it is full, and every position is trained.
        note: What it is, for a person.
    """

    examples: int
    length: int
    trained_share: float
    scale: float
    is_read: bool
    note: str


class Remedy(_Record):
    """A change of the recipe that needs less.

    Args:
        changes: As ``--set`` takes them.
        is_exact: Whether the gradient stays the same, to rounding.
        step: With the change; None where it was not tried.
        note: What it costs or changes, or why it was not tried.
        saves_probes: Whether the change is to do without probes.
    """

    changes: list[str]
    is_exact: bool
    step: StepForecast | None
    note: str
    saves_probes: bool = False


class Forecast(_Record):
    """All of it.

    Args:
        name: Of the recipe.
        device: For a person.
        capacity_bytes: Of the device.
        process_bytes: Of Python and its libraries, on a CPU; 0 on a GPU, where they are not in the device's memory.
        has_probes: Whether the recipe makes probes.
        micro_batches: Of a step.
        max_steps: Of the recipe.
        processes: That train together.
        batch: The largest micro-batch.
        policy: The recipe.
        dense: The same without its policies.
        remedies: Exact ones first.
        flops_per_second: Of the device; None: not known.
        rate_note: Where the rate comes from.
        assumptions: What is not counted, and what was assumed.
        layers_note: How many layers were rehearsed.
    """

    name: str
    device: str
    capacity_bytes: int
    process_bytes: int
    has_probes: bool
    micro_batches: int
    max_steps: int
    processes: int
    batch: BatchForecast
    policy: StepForecast
    dense: StepForecast
    remedies: list[Remedy]
    flops_per_second: float | None
    rate_note: str
    assumptions: list[str]
    layers_note: str

    def need(self, step: StepForecast, *, with_probes: bool | None = None) -> int:
        """Return the bytes that a step needs, with those of a probe if there is one, and of the process."""
        probes = self.has_probes if with_probes is None else with_probes
        return self.process_bytes + max(step.largest_bytes, step.probe_bytes if probes else 0)

    def fit(self, num_bytes: int) -> Fit:
        """Return whether so many bytes fit."""
        share = num_bytes / self.capacity_bytes
        room = 1 / HELD_ON_CPU if self.process_bytes else ROOM
        return "fits" if share <= room else "tight" if share <= 1.0 else "does not fit"

    def step_flops(self, step: StepForecast) -> float:
        """Return the FLOPs of a step of one process, over micro-batches of mean size."""
        return step.pass_flops * self.batch.scale * self.micro_batches + step.update_flops

    def hours(self, step: StepForecast) -> float | None:
        """Return the hours of all steps at the rate; None without one."""
        if self.flops_per_second is None:
            return None
        return self.step_flops(step) * self.max_steps / self.flops_per_second / 3600
