"""Compare a publication's claimed numbers with those measured in its setting, or in a small copy of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsebp_cli.compare import Comparison
from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.number import BYTES, FLOPS, NONE, SECONDS
from sparsebp_cli.compare.statistics import Spread, spread


@dataclass(frozen=True)
class PaperClaim:
    """A number of a publication, as a study's file gives it."""

    arm: str
    metric: str
    value: float
    where: str
    of: str = ""  # the variant whose value divides that of ``arm``; empty: the value itself


@dataclass(frozen=True)
class Paper:
    """A publication and its claims. ``scaled`` lists how a small copy of its setting differs from it."""

    title: str
    link: str
    claims: tuple[PaperClaim, ...] = ()
    scaled: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Paper:
        """Read a paper that ``to_json`` wrote."""
        claims = tuple(PaperClaim(**claim) for claim in content["claims"])
        return cls(str(content["title"]), str(content["link"]), claims, tuple(map(str, content["scaled"])))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON content."""
        return asdict(self)


@dataclass(frozen=True)
class ClaimedNumber:
    """A claimed number beside the measured one.

    Args:
        label: Label of its group; the name of its variant if no run of it counts.
        metric: Name of the metric.
        of: Label of the group whose value divides it; empty for the value itself.
        claimed: The number in the publication.
        where: Where the publication states it.
        measured: The same over the runs that count, or for a ratio over pairs of equal seed; None without any.
        difference: Mean of the measured numbers minus the claimed one; None in a small copy of the setting, which says
            nothing about the claim.
        missing: Why nothing was measured; empty if it was.
    """

    label: str
    metric: str
    of: str
    claimed: float
    where: str
    measured: Spread | None
    difference: float | None
    missing: str = ""


@dataclass(frozen=True)
class Published:
    """A publication beside the measurements.

    Args:
        title: Authors, title and year.
        link: Where it can be read.
        scaled: How the runs differ from the publication's setting, each as ``key=value``; empty if they do not.
        numbers: Its claims.
    """

    title: str
    link: str
    scaled: tuple[str, ...]
    numbers: tuple[ClaimedNumber, ...]


def hold_beside(
    paper: Paper, counted: Mapping[str, Sequence[LoadedRun]], labels: Mapping[str, str], withheld: Sequence[str]
) -> Published:
    """Measure what a paper claims.

    Args:
        paper: The claims.
        counted: Name of a variant to its runs that count.
        labels: Name of a variant to its label in the comparison.
        withheld: Names of the variants whose step times are withheld.

    Returns:
        The claims, each beside the measurement.
    """

    def measure(claim: PaperClaim) -> ClaimedNumber:
        arms = [claim.arm, *([claim.of] if claim.of else [])]
        missing = ""
        if claim.metric.startswith("time/") and any(arm in withheld for arm in arms):
            found, missing = None, "withheld: the machine was busy"
        else:
            found = _measure(claim, counted)
        if found is None and not missing:
            missing = "not measured"
        difference = None if found is None or paper.scaled else found.mean - claim.value
        label, of = (labels.get(arm, arm) for arm in (claim.arm, claim.of))
        return ClaimedNumber(label, claim.metric, of, claim.value, claim.where, found, difference, missing)

    return Published(paper.title, paper.link, paper.scaled, tuple(map(measure, paper.claims)))


def _measure(claim: PaperClaim, counted: Mapping[str, Sequence[LoadedRun]]) -> Spread | None:
    reduce = _find_reducer(claim.metric)
    values = {run.seed: value for run in counted.get(claim.arm, ()) if (value := reduce(run, claim.metric)) is not None}
    if not claim.of:
        return spread(list(values.values()))
    others = {run.seed: value for run in counted.get(claim.of, ()) if (value := reduce(run, claim.metric))}
    return spread([value / others[seed] for seed, value in values.items() if seed in others])


def _find_reducer(metric: str) -> Callable[[LoadedRun, str], float | None]:
    """Choose the reducer (final, largest, median or mean) for a metric."""
    if metric.startswith(("eval/", "test/")):
        return lambda run, name: next((x for x in run.evaluations(name)[-1:] if math.isfinite(x)), None)
    if metric.startswith("memory/"):
        return lambda run, name: max(run.values(name), default=None)
    if metric.startswith("time/"):
        return lambda run, name: _over(statistics.median, run.values(name, after_warmup=True))
    return lambda run, name: _over(statistics.fmean, run.values(name))


def _over(reduce: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return reduce(values) if values else None


def hold_beside_comparison(paper: Paper, comparison: Comparison, runs: Sequence[LoadedRun]) -> Published:
    """Measure what a paper claims, over the runs of a study that count in their comparison. A run has the name of its
    variant."""
    counting = {run.run_id: run.label for run in comparison.runs if run.counts}
    counted: dict[str, list[LoadedRun]] = {run.name: [] for run in runs}
    for run in runs:
        if run.run_id in counting:
            counted[run.name].append(run)
    of_run = {run.run_id: run.label for run in comparison.runs}
    labels = {run.name: of_run[run.run_id] for run in runs}
    untimed = {group.label for group in comparison.groups if group.speed.withheld and group.speed.step is None}
    return hold_beside(paper, counted, labels, [name for name, label in labels.items() if label in untimed])


def make_grid(published: Published) -> Grid:
    """Return the table: claimed, measured, and their difference if the setting is the paper's."""
    rows = []
    for number in published.numbers:
        what = f"{number.metric} of {number.of}" if number.of else number.metric
        difference = () if published.scaled else (_show_difference(number),)
        rows.append(
            (number.label, what, _show(number, number.claimed), _show_measured(number), *difference, number.where)
        )
    difference = () if published.scaled else ("difference",)
    columns = ("group", "metric", "claimed", "measured", *difference, "where it is claimed")
    return Grid("Claimed beside measured", columns, tuple(rows), _note(published), aside=2, words_last=True)


def _note(published: Published) -> str:
    note = f"Claimed by {published.title}, {published.link}."
    if published.scaled:
        return (
            f"{note} Scaled: these runs have another setting, {', '.join(published.scaled)}. Their numbers neither "
            "support nor contradict the claims."
        )
    return (
        f"{note} Measured: mean and standard deviation (runs); a metric `of` another group is divided by that group's, "
        "seed by seed."
    )


def _find_units(number: ClaimedNumber) -> show.Units | None:
    """Return the units of a number; None for a number without a unit, such as a ratio."""
    if number.of:
        return None
    known = {"memory/": BYTES, "time/": SECONDS, "flops/": FLOPS}
    return next((units for start, units in known.items() if number.metric.startswith(start)), None)


def _show(number: ClaimedNumber, value: float) -> str:
    units = _find_units(number)
    return f"{value:.4g}" if units is None else show.scaled(value, units)


def _show_measured(number: ClaimedNumber) -> str:
    if number.measured is None:
        return number.missing
    if _find_units(number) is None:
        return show.of_spread(number.measured)
    return f"{_show(number, number.measured.mean)} ({number.measured.n})"


def _show_difference(number: ClaimedNumber) -> str:
    if number.difference is None:
        return NONE
    units = _find_units(number)
    return f"{number.difference:+.3g}" if units is None else show.scaled(number.difference, units)
