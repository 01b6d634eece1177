"""The result of a benchmark. ``Benchmark.model_json_schema()`` describes the file that is written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsebp_cli.bench.break_even import BreakEven
from sparsebp_cli.bench.request import Request


class Part(BaseModel):
    """Base class of the result's parts: unknown keys and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RoundQuartiles(Part):
    """Median and quartiles over the measured rounds; ``low`` and ``high`` are the first and third quartile."""

    median: float
    low: float
    high: float


class BenchmarkRow(Part):
    """One form at one share kept, or one way to compute all gradients.

    Args:
        site: Kind of site; empty without an engine.
        label: Of the form, or of the way.
        execution: How the engine executes it; ``dense`` where every gradient is kept.
        keep: Share that the policy keeps, in (0, 1); None where it has no such option.
        seconds: Forward plus backward.
        ratio: The same over plain PyTorch's in the same round: below 1 is faster.
        backward_ratio: The backward alone over plain PyTorch's.
        step_ratio: With the optimizer's step, plain SGD.
        processor_ratio: Forward plus backward in CPU seconds over plain PyTorch's; on a GPU the host's.
        forward_flops: As executed.
        backward_flops: As executed, recomputation included.
        flops_ratio: Executed backward over plain PyTorch's.
        ceiling: Largest speed-up of forward plus backward if time were proportional to FLOPs; None without a claim.
        realised_share: Share of the time saving at the ceiling that was reached; None without a claim.
        saved_bytes: Kept between forward and backward.
        saved_ratio: Over plain PyTorch's.
        peak_bytes: Peak use of tensors in one pass, above the use before it; None where unknown.
        peak_ratio: Over plain PyTorch's.
        kept_share: Share of the sites' gradient entries that was kept; None where nothing was chosen.
        cost_ratio: FLOPs of forward and backward over plain PyTorch's; None in files of older versions.
        unit_worth: How many dense units (rows, entries) a kept one must be worth, ``cost_ratio / kept_share``: plain
            PyTorch with that part of the batch costs the same. Choosing by norm can pay only where the gradients'
            effective sample size over their number is below its inverse. None where nothing is chosen.
        note: A remark about this row; empty for none.
        passes: Seconds of every measured pass.
    """

    site: str
    label: str
    execution: Literal["dense", "fast", "csr", "masked", "stored", "recomputed"]
    keep: float | None = None
    seconds: RoundQuartiles
    ratio: RoundQuartiles
    backward_ratio: RoundQuartiles
    step_ratio: RoundQuartiles
    processor_ratio: RoundQuartiles
    forward_flops: int
    backward_flops: int
    flops_ratio: float
    ceiling: float | None
    realised_share: float | None
    saved_bytes: int
    saved_ratio: float
    peak_bytes: int | None
    peak_ratio: float | None
    kept_share: float | None
    cost_ratio: float | None = None
    unit_worth: float | None = None
    note: str = ""
    passes: list[dict[str, float]] = Field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Plain PyTorch's time over this row's."""
        return 1.0 / self.ratio.median


class Benchmark(Part):
    """Every form of a policy against dense, on one machine.

    Args:
        format: Version of this file.
        command: Command that writes such a file again.
        request: The request.
        model: Class, parameters, dtype and device of the model.
        machine: Packages and hardware, threads, load at the start.
        rows: Plain PyTorch first.
        break_evens: One a form with a share to keep, then one a choice between two executions of a form.
    """

    format: Literal[1] = 1
    command: str = ""
    request: Request
    model: dict[str, Any]
    machine: dict[str, Any]
    rows: list[BenchmarkRow]
    break_evens: list[BreakEven]
