"""What a benchmark found. ``Benchmark.model_json_schema()`` describes the file that is written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsebp_cli.bench.break_even import BreakEven
from sparsebp_cli.bench.request import Request


class Part(BaseModel):
    """A part of the result: unknown keys are refused, NaN too."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Quartiles(Part):
    """Of the measured rounds; ``low`` and ``high`` are the first and third quartile."""

    median: float
    low: float
    high: float


class Row(Part):
    """One form at one share kept, or a way to compute all gradients.

    Args:
        site: Kind of site; empty without an engine.
        label: Of the form, or of the way.
        execution: How the engine carries it out; ``dense`` where every gradient is kept.
        keep: Share that the policy keeps, in (0, 1); None where it has no such option.
        seconds: Forward plus backward.
        ratio: The same over plain PyTorch's in the same round: below 1 is faster.
        backward_ratio: The backward alone over plain PyTorch's.
        step_ratio: With the optimizer's step, plain SGD.
        processor_ratio: Forward plus backward in seconds of processor time over plain PyTorch's; on a GPU the host's.
        forward_flops: As executed.
        backward_flops: As executed; what is computed again counts here.
        flops_ratio: Executed backward over plain PyTorch's.
        ceiling: Largest speed-up of forward plus backward if time went with FLOPs; None where nothing is claimed.
        realised_share: Of the saving in time that the ceiling allows; None where none is claimed.
        saved_bytes: Kept between forward and backward.
        saved_ratio: Over plain PyTorch's.
        peak_bytes: Highest use of tensors in one pass, beyond what was there before it; None where it is not known.
        peak_ratio: Over plain PyTorch's.
        kept_share: Share of the sites' gradient entries that was kept; None where nothing was asked.
        cost_ratio: FLOPs of forward and backward over plain PyTorch's; None in files of older versions.
        unit_worth: How many dense units (rows, entries) a kept one must be worth, ``cost_ratio / kept_share``: plain
            PyTorch with that part of the batch costs the same. Choosing by norm can pay only where the gradients'
            effective sample size over their number is below its inverse. None where nothing is chosen.
        note: What is to be known of it; empty when nothing.
        passes: Seconds of every measured pass.
    """

    site: str
    label: str
    execution: Literal["dense", "fast", "csr", "masked", "stored", "recomputed"]
    keep: float | None = None
    seconds: Quartiles
    ratio: Quartiles
    backward_ratio: Quartiles
    step_ratio: Quartiles
    processor_ratio: Quartiles
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
        """How many times as fast as plain PyTorch."""
        return 1.0 / self.ratio.median


class Benchmark(Part):
    """Every form of a policy against dense, on one machine.

    Args:
        format: Version of this file.
        command: That gives such a file again.
        request: What was asked for.
        model: Class, parameters, dtype and device of the model.
        machine: Packages and hardware, threads, load when it began.
        rows: Plain PyTorch first.
        break_evens: One a form with a share to keep, then one a choice between two executions of a form.
    """

    format: Literal[1] = 1
    command: str = ""
    request: Request
    model: dict[str, Any]
    machine: dict[str, Any]
    rows: list[Row]
    break_evens: list[BreakEven]
