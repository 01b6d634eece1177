"""The result of a benchmark. ``Benchmark.model_json_schema()`` describes the file that is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsebp_cli.bench.request import Request


class BreakEven(BaseModel):
    """The share kept below which a form is faster than another computation."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    site: str  # of the form
    label: str  # of the form
    against: str  # label of the slower computation: plain PyTorch, or another form at that site
    # ``at`` a share; ``always`` or ``never`` faster, among the shares measured; ``unclear``: faster at a larger share
    # than one at which it is slower, because of noise or overhead
    kind: Literal["at", "always", "never", "unclear"]
    # the share, where the kind is ``at``; between two that were measured
    keep: float | None = Field(None, gt=0.0, le=1.0)
    smallest: float  # smallest share measured
    largest: float  # largest share measured

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
    """Find the share at which a form takes as long as another, by linear interpolation between the two nearest points.
    ``points`` are pairs of share kept and time ratio, at least one, in any order, no share twice. Time is interpolated
    rather than speed-up: as long as it goes with FLOPs, time is linear in the share kept."""
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
    """Return the share below which a form is faster, among the shares measured: 1.0 if it always is, 0.0 if it never
    is. It lies on a straight line in time between two shares. Where a form is faster at a larger share than one at
    which it is slower, the smaller one counts, and the kind is ``unclear``. No share may occur twice."""
    if not points:
        raise ValueError("there is nothing to interpolate")
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
    # how the engine executes it; ``dense`` where every gradient is kept
    execution: Literal["dense", "fast", "csr", "masked", "stored", "recomputed"]
    keep: float | None = None  # share that the policy keeps, in (0, 1); None where it has no such option
    seconds: RoundQuartiles  # forward plus backward
    ratio: RoundQuartiles  # the same over plain PyTorch's in the same round: below 1 is faster
    backward_ratio: RoundQuartiles  # the backward alone over plain PyTorch's
    step_ratio: RoundQuartiles  # with the optimizer's step, plain SGD
    processor_ratio: RoundQuartiles  # forward plus backward in CPU seconds over plain PyTorch's; on a GPU the host's
    forward_flops: int  # as executed
    backward_flops: int  # as executed, recomputation included
    flops_ratio: float  # executed backward over plain PyTorch's
    # largest speed-up of forward plus backward if time were proportional to FLOPs; None without a claim
    ceiling: float | None
    realised_share: float | None  # share of the time saving at the ceiling that was reached; None without a claim
    saved_bytes: int  # kept between forward and backward
    saved_ratio: float  # over plain PyTorch's
    peak_bytes: int | None  # peak use of tensors in one pass, above the use before it; None where unknown
    peak_ratio: float | None  # over plain PyTorch's
    kept_share: float | None  # share of the sites' gradient entries that was kept; None where nothing was chosen
    # FLOPs of forward and backward over plain PyTorch's; None in files of older versions
    cost_ratio: float | None = None
    # how many dense units (rows, entries) a kept one must be worth, ``cost_ratio / kept_share``: plain PyTorch with
    # that part of the batch costs the same. Choosing by norm can pay only where the gradients' effective sample size
    # over their number is below its inverse. None where nothing is chosen
    unit_worth: float | None = None
    note: str = ""  # A remark about this row; empty for none
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
    break_evens: list[BreakEven]  # one a form with a share to keep, then one a choice between two executions of a form
