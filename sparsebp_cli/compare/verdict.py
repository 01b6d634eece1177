"""A group's result in words, never stronger than its numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparsebp_cli.compare.comparison import COMPILATION, Control
from sparsebp_cli.compare.control import EQUAL_COST, WORDS
from sparsebp_cli.compare.cost import SAVES
from sparsebp_cli.compare.margin import NotWorse
from sparsebp_cli.compare.measured import Busy, ExampleDifference, Quality, Speed
from sparsebp_cli.compare.number import of_change, of_factor, show_interval
from sparsebp_cli.compare.question import Way
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, Difference, Quartiles

COUNTS = {1: "one seed", 2: "two seeds"}
LEVEL = 0.05
SURVIVORS = "of the seeds that did not diverge: "
ROUNDING = 0.005  # of the metric's value: training amplifies the rounding of an exact policy, but never this far


@dataclass(frozen=True)
class Doubts:
    """Reasons to doubt a group's numbers."""

    lost: int = 0  # its runs that did not finish, or were not read completely
    diverged: int = 0  # its runs that finished with a quality that is not finite
    hardware: tuple[str, ...] = ()  # differences of its machines from the baseline's
    other_examples: bool = False  # whether it was evaluated on other examples than the baseline
    # other differences from the baseline that could explain a difference, a sentence each
    sources: tuple[str, ...] = ()
    # whether all its policies and the baseline's are exact and nothing else in the recipe differs
    rounding: bool = False


def give_verdict(
    quality: Quality,
    speed: Speed,
    baseline: Speed,
    metric: str,
    way: Way,
    controls: Sequence[Control],
    doubts: Doubts,
) -> str:
    """State in a few short sentences what a group's numbers show against the baseline. All arguments are the group's,
    except for the baseline's speed; ``way`` is the better direction of the metric."""
    is_plain = quality.unequal is None or quality.difference is None
    found = _quality(quality, metric, way, exact=doubts.rounding) if is_plain else _unequal(quality, metric)
    if doubts.diverged and quality.difference is not None:
        found = f"{SURVIVORS}{found}"
    examples = "" if doubts.rounding else _examples(quality)
    parts = [found, quality.coarsened, examples, _margin(quality.not_worse)]
    if doubts.other_examples:
        parts = [f"evaluated on other examples than the baseline: no statement about {metric}"]
    parts += _speed(speed, baseline, doubts.hardware)
    if quality.difference is not None:
        parts += _controls(controls, speed, way)
    parts += doubts.sources
    if lost := describe_lost(doubts):
        parts.append(lost + (", so quality is that of the survivors" if quality.final else ""))
    return "; ".join(part for part in parts if part) + "."


def split_statements(verdict: str) -> list[str]:
    """Return a verdict's statements, without its final full stop; text in brackets stays whole."""
    return re.split(r"; (?![^()]*\))", verdict.rstrip("."))


OUTCOMES: tuple[str, ...] = (
    "better",
    "lower after other steps or with another batch",
    "equal within the margin",
    "exact",
    "no difference shown",
    "worse",
    "higher after other steps or with another batch",
    "no statement",
)


def find_outcome(verdict: str) -> str:
    """Return which of ``OUTCOMES`` the first statement of a verdict is; never more than it says."""
    first = split_statements(verdict)[0].removeprefix(SURVIVORS)
    if first.startswith("exact: "):
        return "exact"
    if first.startswith("no difference in ") or (first.startswith("after ") and ", no difference in " in first):
        return "no difference shown"
    if first.startswith("after "):
        level = next((word for word in ("lower", "higher") if f" is {word} by " in first), "")
        return next((outcome for outcome in OUTCOMES if level and outcome.startswith(f"{level} ")), "no statement")
    found = (outcome for outcome in ("equal within the margin", "better", "worse") if f" is {outcome} " in first)
    return next(found, "no statement")


def describe_lost(doubts: Doubts) -> str:
    """Return ``1 run did not finish, 2 runs diverged``; empty when there are none."""
    counts = ((doubts.lost, "did not finish"), (doubts.diverged, "diverged"))
    return ", ".join(f"{count} run{'s' * (count > 1)} {what}" for count, what in counts if count)


def differs(difference: Difference | None) -> bool:
    """Whether a difference was shown, after correction for the number of groups. A difference of zero never is."""
    if difference is None or difference.mean == 0.0 or (difference.low, difference.high) == (0.0, 0.0):
        return False
    return difference.decisive_p is not None and difference.decisive_p < LEVEL


def _unequal(quality: Quality, metric: str) -> str:
    """Describe trainings of unequal length or batch by their last common step, without calling one better."""
    unequal = quality.unequal
    assert unequal is not None
    levels = _level(quality.difference, metric)
    if unequal.difference is None:
        return f"after {unequal.words}, {levels}, with no step at which both were evaluated"
    there = _level(unequal.difference, unequal.metric)
    return f"after {unequal.words}, {levels}; at step {unequal.common_step:,}, the last that both evaluated, {there}"


def _level(difference: Difference | None, metric: str) -> str:
    if difference is None or not differs(difference):
        return _state(difference, None, metric, "")
    word = "higher" if difference.mean > 0 else "lower"
    return f"{metric} is {word} by {abs(difference.mean):.3g} ({_describe_interval(difference)})"


def _quality(quality: Quality, metric: str, way: Way, *, exact: bool) -> str:
    if exact and quality.difference is not None:
        return _rounding(quality, quality.difference, metric)
    return _state(quality.difference, quality.not_worse, metric, way)


def _state(difference: Difference | None, margin: NotWorse | None, metric: str, way: Way) -> str:
    if difference is None:
        return "no quality to compare"
    if difference.n < FEWEST_PAIRS or difference.low is None or difference.high is None:
        return f"{COUNTS.get(difference.n, 'no shared seed')}: no statement about quality"
    if difference.p is None:
        if difference.low == difference.high == 0.0:
            return f"{metric} is identical on all {difference.n} seeds"
        same = f"differs by the same {difference.mean:+.3g} on all {difference.n} seeds"
        return f"{metric} {same}: seeds change nothing here, so there is no statement"
    return _decided(difference, margin, metric, way)


def _decided(difference: Difference, margin: NotWorse | None, metric: str, way: Way) -> str:
    inside = f"({_describe_interval(difference)}{_ranks(difference)})"
    if margin is not None and margin.equivalent == "yes":
        word = f", {_better_or_worse(difference, way).removeprefix('is ')}" if differs(difference) else ""
        return f"{metric} is equal within the margin of {margin.margin:g}{word} {inside}"
    if differs(difference):
        small = margin is not None and margin.equivalent == "inconclusive"
        more = f", not shown to be more than the margin of {margin.margin:g}" if margin and small else ""
        return f"{metric} {_better_or_worse(difference, way)} {inside}{more}"
    return f"no difference in {metric} was shown {inside}, which is not proof of equality"


def _rounding(quality: Quality, difference: Difference, metric: str) -> str:
    size = f"{difference.mean:+.2g} in {metric}"
    scale = ROUNDING * abs(quality.final.mean if quality.final else 0.0)
    few = difference.low is None  # too few seeds for an interval: the size alone decides
    if (few or differs(difference)) and abs(difference.mean) > scale:
        how = COUNTS.get(difference.n, "no shared seed") if few else _describe_interval(difference)
        return f"declared exact, but {size} ({how}) is far more than rounding: a fault"
    return f"exact: what differs is rounding ({size})"


def _describe_interval(difference: Difference) -> str:
    kind = "95% interval" if difference.family_low is None else "simultaneous 95% interval"
    return f"{kind} {show_interval(difference)}, {difference.n} seeds"


def _ranks(difference: Difference) -> str:
    """Add the rank test where it disagrees: a few pairs may decide the mean."""
    if difference.rank_p is None or difference.p is None or (difference.p < LEVEL) == (difference.rank_p < LEVEL):
        return ""
    return f"; a signed-rank test disagrees, p = {difference.rank_p:.2g} against {difference.p:.2g}"


def _better_or_worse(difference: Difference, way: Way) -> str:
    if not way:
        return f"differs by {difference.mean:+.3g}"
    word = "worse" if (difference.mean > 0) == (way == "lower") else "better"
    return f"is {word} by {abs(difference.mean):.3g}"


def _examples(quality: Quality) -> str:
    """Describe single examples, only where seeds are too few for more."""
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
    if decision.withheld:
        return f"{text} ({decision.withheld})"
    if decision.looks:
        return f"{text} (after looks at {', '.join(map(str, decision.looks))} seeds, fixed beforehand)"
    if decision.more_seeds is not None:
        return (
            f"{text} (about {decision.more_seeds} seed{'s' * (decision.more_seeds > 1)} more would decide in one look)"
        )
    if decision.answer not in {decision.anytime, "inconclusive"}:
        return f"{text} (in one look; if one has looked before: {decision.anytime})"
    return text


def _speed(speed: Speed, baseline: Speed, hardware: Sequence[str]) -> list[str]:
    """Compare step times with the baseline's; on a busy machine only those that were timed in turns."""
    if speed.step is None or baseline.step is None:
        return ["no step times to compare"]
    if speed.busy is not None or baseline.busy is not None:
        return [f"no statement about step time: {_busy(speed.busy, baseline.busy)}", *_probe_statement(speed)]
    statements = _step_statements(speed, baseline.step)
    if hardware:
        different = ", ".join(hardware)
        what = "of different hardware" if COMPILATION not in hardware else "of another compilation"
        statements.append(f"the step times are {what} ({different}), which can explain all of that")
    return statements


def _busy(own: Busy | None, baselines: Busy | None) -> str:
    both = {"its": own, "the baseline's": baselines}
    found = {whose: busy for whose, busy in both.items() if busy is not None}
    runs = " and ".join(f"{busy.runs} of {whose} {busy.of} runs" for whose, busy in found.items())
    shares = [busy.cpu_share for busy in found.values() if busy.cpu_share is not None]
    loads = [busy.load for busy in found.values() if busy.load is not None]
    how = [f"{min(shares):.0%} of the CPU time of a quiet one"] if shares else []
    how += [f"load {max(loads):.1f} a CPU"] if loads else []
    return f"the machine was busy in {runs} ({', '.join(how)})"


def _probe_statement(speed: Speed) -> list[str]:
    ratio = speed.probe_ratio
    if ratio is None or speed.cost_by == "dense":
        return []
    low, high = (f"{100 * (x - 1.0):+.0f}" for x in (ratio.low, ratio.high))
    change = f"{100 * (ratio.median - 1.0):+.0f} % [{low}, {high}]"
    return [f"timed in turns with dense, forward and backward take {change} (median and quartiles of {ratio.n} probes)"]


def _step_statements(speed: Speed, baseline: Quartiles) -> list[str]:
    """Compare whole steps; where that decides nothing, since their batches differ too, also those timed in turns."""
    decided = _step(speed, baseline)
    if decided is not None:
        return [decided]
    in_turns = _probe_statement(speed)
    return ["whole steps overlap in time", *in_turns] if in_turns else ["step times overlap: neither is clearly faster"]


def _step(speed: Speed, baseline: Quartiles) -> str | None:
    """Say how the time of a step changed; None: the times of few runs overlap."""
    ratio = speed.step_ratio
    assert speed.step is not None
    if ratio is not None and ratio.low is not None:
        if ratio.low == ratio.high == 1.0:
            return "step times are equal"
        if ratio.p is not None and not differs(ratio):
            return f"no difference in step time was shown ({of_change(ratio)})"
        text = f"step time {of_change(ratio)}"
        faster = ratio.mean < 1.0
    elif speed.step.high < baseline.low or speed.step.low > baseline.high:
        faster = speed.step.high < baseline.low
        change = 100 * (speed.step.median / baseline.median - 1.0)
        text = f"step time {change:+.1f} % in these runs"
    else:
        return None
    return f"{text}{_realised(speed.realised_share)}" if faster else text


def _realised(share: Quartiles | None) -> str:
    if share is None or share.median <= 0.0:
        return ""
    if share.low > 1.0:  # beyond the spread of the probes
        return f", more than the policy can save ({share.median:.0%} of the possible saving): one of the two is wrong"
    if share.median > 1.0:
        return ", all of the possible saving was realised, as far as the probes can tell"
    return f", {share.median:.0%} of the possible saving was realised"


def _controls(controls: Sequence[Control], speed: Speed, way: Way) -> list[str]:
    """Compare with random and with the best dense of equal cost, then name the missing controls."""
    statements = [_against(control, WORDS["random"], way) for control in controls if control.kind == "random"]
    if not any(control.kind == "dense" for control in controls):
        return statements
    if speed.step_cost is None:
        return [*statements, "what a step costs is not known (no probe), so there is no dense at equal cost"]
    if speed.step_cost.median > SAVES:
        return [
            *statements,
            f"a step costs {speed.step_cost.median:.2f} dense steps: nothing is saved that dense could use",
        ]
    equal = [control for control in controls if control.kind in EQUAL_COST]
    if best := [control for control in equal if control.is_best]:
        statements.append(_against_best(best[0], speed, way))
    elif any(control.found for control in equal):
        statements.append("no seed is shared with dense at equal cost")
    if missing := [WORDS[control.kind] for control in equal if not control.found]:
        statements.append(f"not compared at equal cost with {', '.join(missing)}")
    return statements


def _against_best(control: Control, speed: Speed, way: Way) -> str:
    by = {"probe": "timed in turns", "flops": "FLOPs counted"}.get(speed.cost_by, "counted")
    what = f"{WORDS[control.kind]} ({control.found}, {of_factor(control.cost)} the policy's cost, {by})"
    return _against(control, f"the best dense of equal cost, {what}", way)


def _against(control: Control, against: str, way: Way) -> str:
    if not control.found:
        return f"not compared with {against}"
    difference = control.difference
    if difference is None or difference.n < FEWEST_PAIRS or difference.low is None or difference.high is None:
        return f"too few seeds for a statement against {against}"
    if not differs(difference) or not way:
        p = difference.decisive_p
        alone = p is not None and not difference.low <= 0.0 <= difference.high  # the interval, unlike p, is uncorrected
        corrected = f"; corrected for all that was compared, p = {p:.2g}" if alone else ""
        return f"no difference from {against} was shown ({show_interval(difference)}{corrected})"
    word = "worse" if (difference.mean > 0) == (way == "lower") else "better"
    return f"{word} than {against}, by {abs(difference.mean):.3g} ({show_interval(difference)})"
