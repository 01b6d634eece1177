"""The report of an audit: plain numbers, the same for the terminal, for JSON and for the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sparsebp_audit.report.applied import Applied
from sparsebp_audit.report.isolation import IsolationReport

SCHEMA = 1  # of the JSON; increased when a field changes its meaning or is removed
THRESHOLD = 0.005  # fraction of the step above which a finding is shown


@dataclass(frozen=True)
class Finding:
    """Something that was computed or kept without use. No two findings count the same work.

    Args:
        kind: A key of ``KINDS``.
        title: The kind in a few words.
        detail: Observation, with its numbers, in one sentence.
        advice: Remedy, in one sentence.
        exact: Whether all of it can be left out without changing any used result.
        modules: Names of the wasting modules, largest waste first; empty for the model itself and work of no module.
        flops: FLOPs wasted in a step.
        flops_share: Wasted FLOPs over all FLOPs of a step, in [0, 1].
        saved_bytes: Bytes kept without use: saved activations of one backward pass, gradients and optimizer state.
        bytes_share: Wasted bytes over all bytes of parameters, gradients, optimizer state and saved activations, in [0,
            1].
        seconds: Seconds that hooks waste in a step under the audit; 0 for other kinds.
        seconds_share: Wasted seconds over the seconds of a step under the audit, in [0, 1].
    """

    kind: str
    title: str
    detail: str
    advice: str
    exact: bool
    modules: tuple[str, ...]
    flops: float
    flops_share: float
    saved_bytes: float
    bytes_share: float
    seconds: float = 0.0
    seconds_share: float = 0.0

    @property
    def share(self) -> float:
        """The largest of the fractions, which is compared with the threshold."""
        return max(self.flops_share, self.bytes_share, self.seconds_share)


@dataclass(frozen=True)
class ModuleWork:
    """What one module computed and saved, and what of it was wasted. FLOPs are per step, bytes per backward pass.

    Args:
        module: Its name; empty for the model itself and work of no module.
        forward_flops: FLOPs of its forward.
        dgrad_flops: FLOPs of gradients of its input.
        wgrad_flops: FLOPs of gradients of its weights.
        other_flops: FLOPs of the rest of its backward, such as attention.
        recomputed_flops: FLOPs of its forward that ran again inside the backward.
        saved_bytes: Bytes that its forward saved for the backward before any other module did.
        wasted_flops: FLOPs of all findings, including those below the threshold.
        wasted_bytes: Saved bytes of all findings, including those below the threshold.
    """

    module: str
    forward_flops: float = 0.0
    dgrad_flops: float = 0.0
    wgrad_flops: float = 0.0
    other_flops: float = 0.0
    recomputed_flops: float = 0.0
    saved_bytes: float = 0.0
    wasted_flops: float = 0.0
    wasted_bytes: float = 0.0


@dataclass(frozen=True)
class AuditReport:
    """What some steps of a training executed and kept, and what of it was wasted.

    Args:
        steps: Optimizer steps that were watched; without an optimizer, backward passes.
        wanted_steps: Requested steps; ``steps`` is less if the training ended before.
        backwards: Backward passes in them.
        forward_flops: FLOPs of forwards that record a graph, in a step.
        backward_flops: FLOPs of the backward without recomputation, in a step.
        recomputed_flops: FLOPs of forwards that ran again inside the backward, in a step.
        ungraded_flops: FLOPs of forwards without gradients, in a step; excluded from all fractions.
        saved_bytes: Bytes that one pass saves for the backward; storages that several operators save count once.
        parameter_bytes: Bytes of all parameters that were seen.
        gradient_bytes: Bytes of their gradients.
        optimizer_bytes: Bytes of the optimizers' state.
        step_seconds: Mean seconds of a step under the audit, which slows it down.
        threshold: Fraction of a step above which a finding is shown.
        wasted_flops_share: Fraction of all FLOPs in exact findings, including those below the threshold.
        wasted_bytes_share: Fraction of all bytes in exact findings, including those below the threshold.
        num_below: Number of findings below the threshold.
        findings: Findings above the threshold, the largest first.
        notes: One sentence each on needed work that may look like waste, and on what could not be judged.
        modules: Every module that computed or saved anything, the most work first.
        applied: Results of ``--apply``, which leaves work out of the running training; None without it.
        examples: Result of the isolation check of ``--examples``; None without it.
        schema: Version of these fields, ``SCHEMA``.
    """

    steps: int
    wanted_steps: int
    backwards: int
    forward_flops: float
    backward_flops: float
    recomputed_flops: float
    ungraded_flops: float
    saved_bytes: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step_seconds: float
    threshold: float
    wasted_flops_share: float
    wasted_bytes_share: float
    num_below: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    modules: tuple[ModuleWork, ...]
    applied: Applied | None = None
    examples: IsolationReport | None = None
    schema: int = field(default=SCHEMA)

    @property
    def step_flops(self) -> float:
        """FLOPs of a step, the reference of all FLOP fractions."""
        return self.forward_flops + self.backward_flops + self.recomputed_flops

    @property
    def total_bytes(self) -> float:
        """Bytes, the reference of all byte fractions."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.saved_bytes

    @property
    def waste_share(self) -> float:
        """The larger fraction of exactly avoidable FLOPs or bytes, which ``--fail-if-waste`` limits."""
        return max(self.wasted_flops_share, self.wasted_bytes_share)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if not self.findings:
            return f"no waste found above {100 * self.threshold:g} % of a step"
        count = f"{len(self.findings)} finding{'s' * (len(self.findings) > 1)}"
        return (
            f"{count}: at most {self.wasted_flops_share:.1%} of the FLOPs of a step and "
            f"{self.wasted_bytes_share:.1%} of the bytes could be skipped without changing results"
        )

    def finding(self, kind: str) -> Finding | None:
        """Return the finding of a kind, a key of ``KINDS``; None if there is none above the threshold."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> AuditReport:
        """Return the report for the result of :meth:`to_dict`, also after JSON, and for a document of ``-o json``."""
        plain = {key: value for key, value in content.items() if key not in {"kind", "warnings"}}
        plain["findings"] = tuple(Finding(**(item | {"modules": tuple(item["modules"])})) for item in plain["findings"])
        plain["modules"] = tuple(ModuleWork(**item) for item in plain["modules"])
        plain["applied"] = None if plain.get("applied") is None else Applied.from_dict(plain["applied"])
        judged = plain.get("examples")
        plain["examples"] = None if judged is None else IsolationReport.from_dict(judged)
        return cls(**(plain | {"notes": tuple(plain["notes"])}))
