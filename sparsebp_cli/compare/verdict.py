"""A group in words: never stronger than its numbers."""

from __future__ import annotations

from sparsebp_cli.compare.comparison import Quality, Speed
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, Difference, Quartiles
from sparsebp_cli.run.metric import METRICS

COUNTS = {1: "one seed", 2: "two seeds"}


def give_verdict(
    quality: Quality, speed: Speed, baseline_step: Quartiles | None, metric: str, margin: float | None, lost: int
) -> str:
    """Say what a group's numbers allow to be said against the baseline.

    Args:
        quality: The group's.
        speed: The group's.
        baseline_step: The baseline's step time.
        metric: Name of the quality metric.
        margin: How much worse still counts as not worse; None: no such statement.
        lost: Runs of the group that did not finish well.

    Returns:
        One or two short sentences.
    """
    parts = [_quality(quality.difference, metric, margin), _speed(speed, baseline_step)]
    if lost:
        parts.append(f"{lost} run{'s' * (lost > 1)} did not finish, so quality is that of the survivors")
    return "; ".join(part for part in parts if part) + "."


def better(metric: str) -> str:
    """Return which way a metric is better: ``lower``, ``higher``, or empty."""
    return METRICS[metric].better if metric in METRICS else ""


def _quality(difference: Difference | None, metric: str, margin: float | None) -> str:
    if difference is None:
        return "no quality to compare"
    if difference.seeds < FEWEST_PAIRS or difference.low is None or difference.high is None:
        shared = COUNTS.get(difference.seeds, "no shared seed")
        return f"{shared}: no statement about quality"
    seeds = f"{difference.seeds} seeds"
    if difference.low == difference.high == 0.0:
        return f"{metric} is identical on all {seeds}"
    worse_is_up = better(metric) == "lower"
    inside = f"95% interval {difference.low:+.3g} to {difference.high:+.3g}, {seeds}"
    if difference.low <= 0.0 <= difference.high:
        text = f"no difference in {metric} was shown ({inside}); that is not proof of equality"
    elif not better(metric):
        text = f"{metric} differs by {difference.mean:+.3g} ({inside})"
    else:
        word = "worse" if (difference.mean > 0) == worse_is_up else "better"
        text = f"{metric} is {word} by {abs(difference.mean):.3g} ({inside})"
    if margin is None or not better(metric):
        return text
    worst = difference.high if worse_is_up else -difference.low
    shown = "not worse" if worst < margin else "not shown to be not worse"
    return f"{text}; {shown} by the margin of {margin:g}"


def _speed(speed: Speed, baseline: Quartiles | None) -> str:
    if speed.step is None or baseline is None or speed.speedup is None:
        return "no step times to compare"
    if speed.step.high < baseline.low:
        text = f"steps take {1 / speed.speedup:.2f} of the baseline's time"
    elif speed.step.low > baseline.high:
        text = f"steps are slower: {1 / speed.speedup:.2f} of the baseline's time"
    else:
        return "step times overlap: neither is clearly faster"
    if speed.realised_share is None:
        return text
    share = speed.realised_share.median
    return f"{text}; {share:.0%} of the possible saving was realised" if share > 0 else text
