"""Make a group's statements from its numbers, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsebp_cli.compare.comparison import COMPILATION, Control
from sparsebp_cli.compare.control import EQUAL_COST, WORDS
from sparsebp_cli.compare.cost import SAVES
from sparsebp_cli.compare.margin import NotWorse
from sparsebp_cli.compare.measured import Cost, ExampleDifference, Quality, Speed, Unequal
from sparsebp_cli.compare.number import of_factor
from sparsebp_cli.compare.question import Way
from sparsebp_cli.compare.statement import Number, Outcome, Statement, Subject, is_shown
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, Difference
from sparsebp_cli.run import metric as names

# See decision 10.
ROUNDING = 0.005  # of the metric's value: mean effect over seeds of an exact policy's rounding, after training
# The same for one seed: 1.7 % was seen after 220 steps, with a gradient error of 4e-7 (docs/results/fast.json).
ROUNDING_OF_A_SEED = 0.025
SAME_MEMORY = 5e-4  # a smaller change of memory prints as 0.0 %
SURVIVORS = "for the seeds whose runs did not diverge"
BY = {"steps": "FLOPs, update included", "probe": "timed in turns", "flops": "FLOPs counted"}  # source of a cost
STEP_RATIO = f"{names.STEP_SECONDS.name}.ratio"


@dataclass(frozen=True)
class Doubts:
    """Reasons to doubt a group's numbers."""

    lost: int = 0  # number of runs that did not finish
    diverged: int = 0  # number of runs that finished with a quality that is not finite
    # number of these on seeds on which the baseline did not diverge
    diverged_alone: int = 0
    hardware: tuple[str, ...] = ()  # differences between its machines and the baseline's that affect step times
    other_examples: bool = False  # whether it was evaluated on other examples than the baseline
    # one sentence for each other property that could explain a difference from the baseline
    sources: tuple[str, ...] = ()
    # whether its policies and the baseline's are all exact and nothing else in the recipe differs
    rounding: bool = False


def give_verdict(
    quality: Quality,
    speed: Speed,
    baseline: Speed,
    cost: Cost,
    metric: str,
    way: Way,
    controls: Sequence[Control],
    doubts: Doubts,
) -> tuple[Statement, ...]:
    """Return the statements that a group's numbers support against the baseline, quality first. All arguments are the
    group's, except the baseline's speed. ``way`` is the better direction of the metric."""
    found = _quality(quality, metric, way, doubts)
    if not doubts.rounding:
        found += _examples(quality)
    if quality.not_worse is not None and not doubts.other_examples:
        found.append(_margin(quality.not_worse))
    found += [*_cost(speed), _step_time(speed, baseline, doubts.hardware), *_memory(cost)]
    if quality.difference is not None:
        found += _controls(controls, speed, way)
    found += _note(*doubts.sources)
    lost = describe_lost(doubts)
    found += _note(lost + ", so the quality is of the other runs only" * bool(lost and quality.final))
    return tuple(found)


def state_baseline(doubts: Doubts) -> tuple[Statement, ...]:
    """Return the statements that readers need about the baseline."""
    return tuple(_note("baseline", describe_lost(doubts)))


def describe_lost(doubts: Doubts) -> str:
    """Return ``1 run did not finish, 2 runs diverged``; empty if there are none."""
    counts = ((doubts.lost, "did not finish"), (doubts.diverged, "diverged"))
    return ", ".join(f"{count} run{'s' * (count > 1)} {what}" for count, what in counts if count)


def differs(difference: Difference | None) -> bool:
    """Return whether a difference was shown, after correction for the number of groups. A zero difference never is."""
    return difference is not None and is_shown(Number.of("", difference))


def _note(*texts: str) -> list[Statement]:
    return [Statement("no statement", "circumstance", (), (text,)) for text in texts if text]


def _quality(quality: Quality, metric: str, way: Way, doubts: Doubts) -> list[Statement]:
    """Return the statement on quality; for trainings of unequal length or batch, add that on their last common step."""
    difference, unequal = quality.difference, quality.unequal
    if doubts.other_examples:
        return [Statement("no statement", "quality", (), ("evaluated on other examples than the baseline",))]
    if difference is None:
        return [Statement("no statement", "quality")]
    number, reasons = Number.of(metric, difference), (SURVIVORS,) if doubts.diverged else ()
    if unequal is not None:
        trained = f"with {unequal.words} of the baseline"
        main = Statement(_judge(difference, None, ""), "quality", (number,), (*reasons, trained))
        rest = _common_step(unequal, reasons)
    elif doubts.rounding:
        main, rest = Statement(_judge_rounding(number, quality), "quality", (number,), reasons), []
    else:
        outcome = _judge(difference, quality.not_worse, way)
        outcome = "differs" if outcome in {"lower", "higher"} else outcome  # the better direction is unknown
        numbers = (number, *_margin_numbers(number, quality.not_worse, way))
        main, rest = Statement(outcome, "quality", numbers, reasons), []
    if doubts.diverged_alone and main.outcome in {"better", "equal within the margin", way}:
        # A diverged run is worse than any other, so the remaining seeds cannot show a gain.
        main = replace(main, outcome="no statement")
    return [main, *rest]


def _common_step(unequal: Unequal, reasons: tuple[str, ...]) -> list[Statement]:
    if unequal.difference is None:
        return _note("there is no step at which both groups were evaluated")
    number = Number.of(unequal.metric, unequal.difference)
    where = f"at step {unequal.common_step:,}, the last step at which both groups were evaluated"
    return [Statement(_judge(unequal.difference, None, ""), "common step", (number,), (*reasons, where))]


def _judge(difference: Difference, margin: NotWorse | None, way: Way) -> Outcome:
    """Return what a difference shows. Without a known better direction, this is *lower* or *higher*."""
    if difference.n < FEWEST_PAIRS or difference.low is None or difference.high is None:
        return "no statement"
    if difference.p is None:
        return "identical" if difference.low == difference.high == 0.0 else "no statement"
    if margin is not None and margin.equivalent == "yes":
        return "equal within the margin"
    if not differs(difference):
        return "no difference shown"
    if not way:
        return "higher" if difference.mean > 0 else "lower"
    return "worse" if (difference.mean > 0) == (way == "lower") else "better"


def _judge_rounding(number: Number, quality: Quality) -> Outcome:
    """Return what the difference of a policy that declares itself exact shows: rounding, or that it is not exact."""
    scale = abs(quality.final.mean if quality.final else 0.0)
    if number.low is None:  # too few seeds for an interval: only the size decides
        return "exact" if abs(number.value) <= ROUNDING_OF_A_SEED * scale else "fault"
    if abs(number.value) <= ROUNDING * scale:
        return "exact"
    return "fault" if is_shown(number) or number.p is None else "no difference shown"


def _margin_numbers(number: Number, margin: NotWorse | None, way: Way) -> tuple[Number, ...]:
    """Return the margin if the statement on quality names it, and the size of a shown difference within it."""
    if margin is None or margin.equivalent == "no":
        return ()
    found = (Number("margin", margin.margin),)
    if margin.equivalent != "yes" or not is_shown(number):
        return found
    word = "worse by" if (number.value > 0) == (way == "lower") else "better by"
    return (*found, Number(word, abs(number.value)))


def _examples(quality: Quality) -> list[Statement]:
    """Describe single examples, only if seeds are too few for more."""
    if quality.difference is None or quality.difference.low is not None:
        return []
    return [statement for entry in quality.examples[:2] for statement in _on_examples(entry)]


def _on_examples(entry: ExampleDifference) -> list[Statement]:
    found = entry.difference
    if found.low is None or found.high is None or found.decisive_p is None:
        return []
    examples = f"{found.n} held-out examples in {entry.clusters} {entry.clustered_by}s"
    where = f"as a description of two models, not of other seeds: on {examples} the model of seed {entry.seed}"
    outcome: Outcome = _judge(found, None, "")
    return [Statement(outcome, "examples", (Number.of(f"{entry.metric}, seed {entry.seed}", found),), (where,))]


def _margin(decision: NotWorse) -> Statement:
    answers: dict[str, Outcome] = {"yes": "not worse", "no": "worse", "inconclusive": "inconclusive"}
    numbers = (Number("margin", decision.margin),)
    return Statement(answers[decision.answer], "margin", numbers, _margin_reasons(decision))


def _margin_reasons(decision: NotWorse) -> tuple[str, ...]:
    if decision.withheld:
        return (decision.withheld,)
    if decision.more_seeds is not None:
        return (f"about {decision.more_seeds} seed{'s' * (decision.more_seeds > 1)} more would settle it in one look",)
    if decision.answer not in {decision.anytime, "inconclusive"}:
        return (f"if this is your only look; after earlier looks: {decision.anytime}",)
    return ()


def _step_time(speed: Speed, baseline: Speed, hardware: Sequence[str]) -> Statement:
    """Return the statement on the times of whole steps of two runs."""
    why = speed.withheld or baseline.withheld
    if why or speed.step is None or baseline.step is None:
        return Statement("no statement", "step time", (), (why,) if why else ())
    others, ratio = (_describe_hardware(hardware),) if hardware else (), speed.step_ratio
    if ratio is not None and ratio.low is not None:
        number = Number.of(STEP_RATIO, ratio)
        return Statement("no statement" if others else _judge_ratio(number), "step time", (number,), others)
    if others:
        return Statement("no statement", "step time", (), others)
    if speed.step.high >= baseline.step.low and speed.step.low <= baseline.step.high:
        return Statement("no difference shown", "step time")
    # few runs: report their values without a finding
    return Statement("no statement", "step time", (Number(STEP_RATIO, speed.step.median / baseline.step.median),))


def _describe_hardware(hardware: Sequence[str]) -> str:
    what = "another compilation" if COMPILATION in hardware else "different hardware"
    return f"the step times are of {what} ({', '.join(hardware)}), which can explain the whole difference"


def _judge_ratio(number: Number) -> Outcome:
    if number.low == number.high == 1.0:
        return "identical"
    if number.p is not None and not is_shown(number, 1.0):
        return "no difference shown"
    return "lower" if number.value < 1.0 else "higher"


def _cost(speed: Speed) -> list[Statement]:
    """Return the statement on the counted FLOPs of all steps. They are no sample, so the number itself decides."""
    if speed.cost is None or speed.cost_by != "steps":
        return []
    number = Number.of("cost", speed.cost)
    outcome: Outcome = "lower" if number.value < SAVES else "higher" if number.value > 2 - SAVES else "identical"
    return [Statement(outcome, "cost", (number,))]


def _memory(cost: Cost) -> list[Statement]:
    ratio = cost.held_ratio
    if ratio is None or not ratio.n:
        return []
    number = Number.of("memory held", ratio)
    if abs(number.value - 1.0) < SAME_MEMORY:
        return []
    outcome: Outcome = "no statement" if number.low is None else _judge_ratio(number)
    return [Statement(outcome, "memory", (number,))]


def _controls(controls: Sequence[Control], speed: Speed, way: Way) -> list[Statement]:
    """Return the statements against random and the best dense of equal cost, then the missing controls."""
    found = [_against("random", control, WORDS["random"], way) for control in controls if control.kind == "random"]
    if not any(control.kind == "dense" for control in controls):
        return found
    if speed.step_cost is None:
        return [*found, *_note("no probe measured the cost of a step, so no dense run of equal cost is known")]
    if speed.step_cost > SAVES:
        return [
            *found,
            *_note("the policy saves less than 2 % of a dense step, so no dense control at equal cost is needed"),
        ]
    equal = [control for control in controls if control.kind in EQUAL_COST]
    if best := [control for control in equal if control.is_best]:
        found.append(_against_best(best[0], speed, way))
    elif any(control.found for control in equal):
        found += _note("no dense run of equal cost has a seed of this group")
    if missing := [WORDS[control.kind] for control in equal if not control.found]:
        found += _note(f"not compared at equal cost with {', '.join(missing)}")
    return found


def _against_best(control: Control, speed: Speed, way: Way) -> Statement:
    by = BY.get(speed.cost_by, "counted")
    what = f"{WORDS[control.kind]} ({control.found}, {of_factor(control.cost)} the policy's cost, {by})"
    statement = _against("equal cost", control, f"the best dense of equal cost, {what}", way)
    cost = () if control.cost is None else (Number("cost", control.cost),)
    return replace(statement, numbers=(*statement.numbers, *cost))


def _against(subject: Subject, control: Control, against: str, way: Way) -> Statement:
    if not control.found:
        return Statement("no statement", subject, (), (f"not compared with {against}",))
    difference = control.difference
    if difference is None or difference.n < FEWEST_PAIRS or difference.low is None:
        numbers = () if difference is None else (Number.of(control.found, difference),)
        return Statement("no statement", subject, numbers, (f"too few seeds to judge a difference from {against}",))
    outcome: Outcome = "no difference shown"
    if differs(difference):
        outcome = _judge(difference, None, way) if way else "differs"
    return Statement(outcome, subject, (Number.of(control.found, difference),), (against,))
