"""Make the short answer of a comparison, for one screen and for the top of the report: one row per group."""

from __future__ import annotations

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.number import BYTES, NONE
from sparsebp_cli.compare.overview_grid import WITHHELD, find_gains, over_shared_seeds
from sparsebp_cli.compare.statement import Subject

LONGEST_LABEL = 20  # characters; the verdict above the table has the whole label
NOTE = (
    "To baseline: the difference paired by seed, with a 95% interval from three seeds up. Cost: FLOPs of all steps "
    "divided by the baseline's (of older runs: from probes). Speed: of whole steps, as a multiple of the baseline's. "
    "Limit: speed-up of forward and backward if time falls in proportion to FLOPs. Memory: the largest in a step. "
    "Bold: a statistically shown gain."
)


def answer_grid(comparison: Comparison, *, is_short: bool = True) -> Grid:
    """Return quality, cost, speed with its limit, and memory of each group. ``is_short`` cuts long labels."""
    label = _cut if is_short else str
    rows = tuple((label(group.label), *_row(comparison, group)) for group in comparison.groups)
    way = f", {comparison.better} is better" if comparison.better else ""
    columns = ("group", "mean", "to baseline", "cost", "speed", "limit", "memory")
    gains: dict[Subject, str] = {"quality": "to baseline", "step time": "speed", "memory": "memory"}
    bold = [find_gains(comparison, comparison.groups, one, columns, name) for one, name in gains.items()]
    kind = comparison.interval_kind
    title = f"{comparison.metric}{way}{kind and f' [{kind}]'}"
    return Grid(title, columns, rows, NOTE, bold=frozenset().union(*bold))


def _row(comparison: Comparison, group: Group) -> tuple[str, ...]:
    quality, speed, mean = group.quality, group.speed, over_shared_seeds(comparison, group)
    ratio = 1.0 if group.baseline and speed.step else None if speed.step_ratio is None else speed.step_ratio.mean
    return (
        show.of_plain(None if mean is None else mean.mean, 4),
        "" if group.baseline else show.of_difference(quality.difference),
        NONE if speed.cost is None else f"{speed.cost.mean:.2f}",
        WITHHELD if speed.withheld else show.of_factor(1.0 / ratio if ratio else None),
        show.of_factor(speed.limit),
        show.scaled(group.cost.held_bytes, BYTES),
    )


def _cut(label: str) -> str:
    """Shorten a long label in its middle, because the names of a sweep differ at their ends."""
    half = LONGEST_LABEL // 2
    return label if len(label) <= LONGEST_LABEL else f"{label[: half - 1]}…{label[-half:]}"
