"""The result of a benchmark; ``Benchmark.model_json_schema()`` describes the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsebp_tools.bench.request import Request


class BreakEven(BaseModel):
    """The kept fraction below which a form is faster than another computation."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    site: str  # of the form
    label: str  # of the form
    against: str  # label of the slower computation: plain PyTorch, or another form at that site
    # ``at`` a fraction; ``always`` or ``never`` faster, among the measured fractions; ``unclear``: faster at a larger
    # fraction than one at which it is slower, because of noise or overhead.
    kind: Literal["at", "always", "never", "unclear"]
    # The fraction, if the kind is ``at``; between two measured ones.
    keep: float | None = Field(None, gt=0.0, le=1.0)
    smallest: float  # smallest measured fraction
    largest: float  # largest measured fraction

    @property
    def words(self) -> str:
        """The break-even as a short text."""
        if self.kind == "at":
            return f"below {self.keep:.3g}"
        if self.kind == "unclear":
            return "unclear: faster and slower in turn"
        measured = f"{self.smallest:g}" if self.smallest == self.largest else f"{self.smallest:g} to {self.largest:g}"
        return f"{self.kind} (of {measured})"


def find_break_even(site: str, label: str, against: str, points: Sequence[tuple[float, float]]) -> BreakEven:
    """Return the kept fraction at which a form takes as long as another, interpolated between the two nearest points.
    ``points`` are pairs of kept fraction and time ratio, at least one, in any order, no fraction twice. It interpolates
    time instead of speed-up, because time is linear in the kept fraction if it is proportional to FLOPs."""
    kind, keep = find_crossing(points)
    shares = [share for share, _ in points]
    return BreakEven(
        site=site,
        label=label,
        against=against,
        kind=kind,
        keep=keep if kind == "at" else None,
        smallest=min(shares),
        largest=max(shares),
    )


def find_crossing(points: Sequence[tuple[float, float]]) -> tuple[Literal["at", "always", "never", "unclear"], float]:
    """Return the fraction below which a form is faster, among the measured ones: 1.0 if it always is, 0.0 if it never
    is. Between two fractions, time is interpolated linearly. If a form is faster at a larger fraction than one at which
    it is slower, the smaller one counts, and the kind is ``unclear``. No fraction may occur twice."""
    if not points:
        raise ValueError("there is nothing to interpolate: give at least one point")
    ordered = sorted(points)
    num_faster = next((number for number, (_, ratio) in enumerate(ordered) if ratio >= 1.0), len(ordered))
    if num_faster == len(ordered):
        return "always", 1.0
    kind: Literal["at", "never", "unclear"] = "at" if num_faster else "never"
    if any(ratio < 1.0 for _, ratio in ordered[num_faster:]):
        kind = "unclear"
    if not num_faster:
        return kind, 0.0
    (low, below), (high, above) = ordered[num_faster - 1], ordered[num_faster]
    return kind, low + (high - low) * (1.0 - below) / (above - below)


class Part(BaseModel):
    """Base class of the result's parts: unknown keys and NaN are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RoundQuartiles(Part):
    """Median and quartiles over the measured rounds; ``low`` and ``high`` are the first and third quartile."""

    median: float
    low: float
    high: float


class BenchmarkRow(Part):
    """One form at one share kept, or one way to compute all gradients."""

    site: str  # kind of site; empty without an engine
    label: str  # of the form, or of the way
    # How the engine executes it; ``dense`` if every gradient is kept.
    execution: Literal["dense", "fast", "csr", "masked"]
    keep: float | None = None  # fraction that the policy keeps, in (0, 1); None if it has no such option
    seconds: RoundQuartiles  # forward plus backward
    ratio: RoundQuartiles  # the same over plain PyTorch's in the same round: below 1 is faster
    backward_ratio: RoundQuartiles  # the backward alone over plain PyTorch's
    step_ratio: RoundQuartiles  # with the optimizer's step, plain SGD
    processor_ratio: RoundQuartiles  # forward plus backward in CPU seconds over plain PyTorch's; on a GPU the host's
    forward_flops: int  # counted
    backward_flops: int  # counted, recomputation included
    flops_ratio: float  # counted backward over plain PyTorch's
    # Speed-up limit: that of forward plus backward if time were proportional to FLOPs; None without an estimate.
    ceiling: float | None
    realised_share: float | None  # fraction of the limit's time saving that was reached; None without an estimate
    saved_bytes: int  # kept between forward and backward
    saved_ratio: float  # over plain PyTorch's
    peak_bytes: int | None  # peak use of tensors in one pass, above the use before it; None if unknown
    peak_ratio: float | None  # over plain PyTorch's; None if unknown
    kept_share: float | None  # kept fraction of the sites' gradient entries; None if nothing was chosen
    # FLOPs of forward and backward over plain PyTorch's; None in files of older versions
    cost_ratio: float | None = None
    # Number of dense units (rows, entries) that a kept one must replace, ``cost_ratio / kept_share``, since plain
    # PyTorch with that part of the batch costs the same. Choosing by norm can gain only if the gradients' effective
    # sample size over their number is below its inverse. None if nothing is chosen.
    unit_worth: float | None = None
    note: str = ""  # a remark about this row; empty for none
    passes: list[dict[str, float]] = Field(default_factory=list)  # seconds of every measured pass

    @property
    def speedup(self) -> float:
        """Plain PyTorch's time over this row's."""
        return 1.0 / self.ratio.median


class Benchmark(Part):
    """Every form of a policy against dense, on one machine."""

    format: Literal[1] = 1  # version of this file
    command: str = ""  # command that writes such a file again
    request: Request  # the request
    model: dict[str, Any]  # class, parameters, dtype and device of the model
    machine: dict[str, Any]  # packages and hardware, threads, load at the start
    rows: list[BenchmarkRow]  # plain PyTorch first
    # one for each form with a kept fraction, then one for each choice between two executions of a form
    break_evens: list[BreakEven]
