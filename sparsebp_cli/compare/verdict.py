"""A group in words: never stronger than its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsebp_cli.compare.comparison import Control
from sparsebp_cli.compare.direction import Way
from sparsebp_cli.compare.margin import NotWorse
from sparsebp_cli.compare.measured import ExampleDifference, Quality, Speed
from sparsebp_cli.compare.number import of_change, show_interval
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, Difference, Quartiles

COUNTS = {1: "one seed", 2: "two seeds"}
LEVEL = 0.05


@dataclass(frozen=True)
class Doubts:
    """What takes from a group's numbers.

    Args:
        lost: Its runs that did not finish, or were not read to their end.
        diverged: Its runs that finished with a quality that is no number.
        hardware: In what its machines differ from the baseline's.
        other_examples: Whether it was evaluated on other examples than the baseline.
    """

    lost: int = 0
    diverged: int = 0
    hardware: tuple[str, ...] = ()
    other_examples: bool = False


def give_verdict(
    quality: Quality,
    speed: Speed,
    baseline_step: Quartiles | None,
    metric: str,
    way: Way,
    controls: Sequence[Control],
    doubts: Doubts,
) -> str:
    """Say what a group's numbers allow to be said against the baseline.

    Args:
        quality: The group's.
        speed: The group's.
        baseline_step: The baseline's step time.
        metric: Name of the quality metric.
        way: Which way it is better.
        controls: The group's.
        doubts: What takes from them.

    Returns:
        A few short sentences.
    """
    parts = [_quality(quality.difference, metric, way), _examples(quality), _margin(quality.not_worse)]
    if doubts.other_examples:
        parts = [f"evaluated on other examples than the baseline: no statement about {metric}"]
    parts.append(_speed(speed, baseline_step))
    if doubts.hardware and speed.step is not None and baseline_step is not None:
        different = ", ".join(doubts.hardware)
        parts.append(f"the step times are of different hardware ({different}), which can explain all of that")
    parts += [_control(control, way) for control in controls if quality.difference is not None]
    if told := tell_lost(doubts):
        parts.append(told + (", so quality is that of the survivors" if quality.final else ""))
    return "; ".join(part for part in parts if part) + "."


def tell_lost(doubts: Doubts) -> str:
    """Return ``1 run did not finish, 2 runs diverged``; empty when all went well."""
    counts = ((doubts.lost, "did not finish"), (doubts.diverged, "diverged"))
    return ", ".join(f"{count} run{'s' * (count > 1)} {what}" for count, what in counts if count)


def differs(difference: Difference | None) -> bool:
    """Whether a difference was shown, after correction for the number of groups."""
    p = None if difference is None else difference.decisive_p
    return p is not None and p < LEVEL


def _quality(difference: Difference | None, metric: str, way: Way) -> str:
    if difference is None:
        return "no quality to compare"
    if difference.n < FEWEST_PAIRS or difference.low is None or difference.high is None:
        return f"{COUNTS.get(difference.n, 'no shared seed')}: no statement about quality"
    if difference.low == difference.high == 0.0:
        return f"{metric} is identical on all {difference.n} seeds"
    if difference.p is None:
        same = f"differs by the same {difference.mean:+.3g} on all {difference.n} seeds"
        return f"{metric} {same}: seeds change nothing here, so there is no statement"
    inside = f"95% interval {show_interval(difference)}, {difference.n} seeds"
    if differs(difference):
        return f"{metric} {_word(difference, way)} ({inside})"
    if not difference.low <= 0.0 <= difference.high:
        inside += f", corrected for the number of groups, p = {difference.decisive_p:.2g}"
    return f"no difference in {metric} was shown ({inside}), which is not proof of equality"


def _word(difference: Difference, way: Way) -> str:
    if not way:
        return f"differs by {difference.mean:+.3g}"
    word = "worse" if (difference.mean > 0) == (way == "lower") else "better"
    return f"is {word} by {abs(difference.mean):.3g}"


def _examples(quality: Quality) -> str:
    """Only where seeds are too few to say more."""
    if quality.difference is None or quality.difference.low is not None or not quality.examples:
        return ""
    return "; ".join(_on_examples(entry) for entry in quality.examples[:2])


def _on_examples(entry: ExampleDifference) -> str:
    found = entry.difference
    if found.low is None or found.high is None or found.decisive_p is None:
        return ""
    examples = f"{found.n} held-out examples in {entry.clusters} {entry.clustered_by}s"
    where = f"descriptively, of two models and not of seeds: on {examples} the model of seed {entry.seed}"
    inside = show_interval(found)
    if found.decisive_p >= LEVEL:
        return f"{where} is not shown to differ in loss ({inside})"
    word = "a larger" if found.mean > 0 else "a smaller"
    return f"{where} has {word} loss by {abs(found.mean):.3g} ({inside})"


def _margin(decision: NotWorse | None) -> str:
    if decision is None:
        return ""
    text = f"not worse by more than the margin of {decision.margin:g}: {decision.answer}"
    if decision.more_seeds is not None:
        text += f" (about {decision.more_seeds} seed{'s' * (decision.more_seeds > 1)} more would decide)"
    return text


def _speed(speed: Speed, baseline: Quartiles | None) -> str:
    ratio = speed.step_ratio
    if speed.step is None or baseline is None:
        return "no step times to compare"
    if ratio is not None and ratio.low is not None:
        if ratio.low == ratio.high == 1.0:
            return "step times are equal"
        if ratio.p is not None and not differs(ratio):
            outside = not ratio.low <= 1.0 <= (ratio.high or ratio.low)
            why = f", corrected for the number of groups, p = {ratio.decisive_p:.2g}" if outside else ""
            return f"no difference in step time was shown ({of_change(ratio)}{why})"
        text = f"step time {of_change(ratio)}"
        faster = ratio.mean < 1.0
    elif speed.step.high < baseline.low or speed.step.low > baseline.high:
        faster = speed.step.high < baseline.low
        change = 100 * (speed.step.median / baseline.median - 1.0)
        text = f"step time {change:+.1f} % in these runs"
    else:
        return "step times overlap: neither is clearly faster"
    if speed.realised_share is None or not faster:
        return text
    share = speed.realised_share.median
    return f"{text}, {share:.0%} of the possible saving was realised" if share > 0 else text


def _control(control: Control, way: Way) -> str:
    if control.kind == "dense":
        return ""
    against = "random at the same budget" if control.kind == "random" else "dense in the same time"
    if not control.found:
        return f"not compared with {against}"
    difference = control.difference
    if difference is None or difference.n < FEWEST_PAIRS or difference.low is None or difference.high is None:
        return f"too few seeds for a statement against {against}"
    if not differs(difference) or not way:
        return f"no difference from {against} was shown"
    word = "worse" if (difference.mean > 0) == (way == "lower") else "better"
    return f"{word} than {against} by {abs(difference.mean):.3g}"
