"""Plain records of a recipe's forecast: memory, FLOPs and time, before anything of it is loaded."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from sparsebp_cli.plan.plan import Plan

ROOM = 0.9  # usable fraction of the memory: the rest is for the allocator's gaps and uncounted use
# Largest measured ratio of a CPU process's memory to the counted bytes: 3.11 GB to 1.32 GB, with a 4-bit base, which is
# saved as numbers (SmolLM2-135M, torch 2.13, 2026-11-28).
HELD_ON_CPU = 2.4
Fit = Literal["fits", "tight", "does not fit"]


class _Record(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class ForecastRequest(_Record):
    """The client's request.

    Args:
        plan: The recipe, with absolute paths.
        gpu: Whether it runs on a GPU; False: on this machine's CPU.
        capacity_bytes: The memory of the device; None: this machine's free memory.
        flops_per_second: A given or measured rate; None: the worker measures products on this machine, or with ``gpu``
            there is no rate.
        remedies: Whether to try changes that need less memory.
    """

    plan: Plan
    gpu: bool
    capacity_bytes: int | None = None
    flops_per_second: float | None = None
    remedies: bool = True


class Parts(_Record):
    """Bytes by purpose at one moment. ``logits`` is not part of activations and workspace: it counts logits, their
    gradients and the loss's copies."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspace


class StepForecast(_Record):
    """A step with one set of policies.

    Args:
        policy: Names of the policies.
        phases: The peak of each phase that the step has.
        pass_flops: FLOPs of forward and backward over the largest micro-batch.
        attention_flops: The part of them that grows with the square of the length.
        update_flops: FLOPs of the optimizer's update.
        gradient_bytes: Bytes of all gradients of a step, kept or not.
        num_parameters: Parameters of the model, adapters included.
        num_trained: Trained parameters among them.
        comparison: The peak of a step in which the policy compares itself with the plain step; None if it never does,
            or always does.
        trial: The peak of the trial passes that a policy requests before some step; None without any.
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
        """The highest peak over all steps, including steps with a comparison, and over trial passes."""
        return max(parts.total for parts in (self.peak, self.comparison, self.trial) if parts is not None)

    @property
    def probe_bytes(self) -> int:
        """The estimated peak of a probe: passes as in a step, beside the gradients of both sides."""
        passes = max(parts.total for phase, parts in self.phases.items() if phase != "update")
        return passes + 2 * self.gradient_bytes


class BatchForecast(_Record):
    """The largest micro-batch, and the mean work of all.

    Args:
        examples: Its examples.
        length: Its positions, padded.
        trained_share: Fraction of its positions with a label.
        scale: Work of the mean micro-batch over that of the largest.
        is_read: Whether it comes from the recipe's own data; False: it is full, and every position is trained.
        note: Its description for people.
    """

    examples: int
    length: int
    trained_share: float
    scale: float
    is_read: bool
    note: str


class Remedy(_Record):
    """A change of the recipe that needs less memory.

    Args:
        changes: Arguments of ``--set``.
        is_exact: Whether the gradient stays the same, up to rounding.
        step: The step with the change; None if it was not tried.
        note: What it costs or changes, or why it was not tried.
        saves_probes: Whether the change removes the probes.
    """

    changes: list[str]
    is_exact: bool
    step: StepForecast | None
    note: str
    saves_probes: bool = False


class Forecast(_Record):
    """The complete forecast.

    Args:
        name: Name of the recipe.
        device: Device, for people.
        capacity_bytes: Memory of the device.
        process_bytes: Memory of Python and its libraries on a CPU; 0 on a GPU, whose memory does not hold them.
        has_probes: Whether the recipe makes probes.
        micro_batches: Micro-batches in a step.
        max_steps: Steps of the recipe.
        processes: Processes that train together.
        batch: The largest micro-batch.
        policy: The step of the recipe.
        dense: The same without its policies.
        remedies: Changes, exact ones first.
        flops_per_second: Rate of the device; None: unknown.
        rate_note: Origin of the rate.
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
        """Return the bytes that a step needs, including a probe's, if there is one, and the process's."""
        probes = self.has_probes if with_probes is None else with_probes
        return self.process_bytes + max(step.largest_bytes, step.probe_bytes if probes else 0)

    def fit(self, num_bytes: int) -> Fit:
        """Return whether ``num_bytes`` fit."""
        share = num_bytes / self.capacity_bytes
        room = 1 / HELD_ON_CPU if self.process_bytes else ROOM
        return "fits" if share <= room else "tight" if share <= 1.0 else "does not fit"

    def step_flops(self, step: StepForecast) -> float:
        """Return the FLOPs of a step of one process, over micro-batches of mean size."""
        return step.pass_flops * self.batch.scale * self.micro_batches + step.update_flops

    def hours(self, step: StepForecast) -> float | None:
        """Return the hours of all steps at the known rate; None without a rate."""
        if self.flops_per_second is None:
            return None
        return self.step_flops(step) * self.max_steps / self.flops_per_second / 3600
