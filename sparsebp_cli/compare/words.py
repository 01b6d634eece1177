"""Put a group's statements into words, never stronger than they are. Words come last: no code reads them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsebp_cli.compare.number import show_change, show_ends, show_ratio
from sparsebp_cli.compare.statement import Number, Outcome, Statement, Subject
from sparsebp_cli.compare.statistics import FEWEST_PAIRS

COUNTS = {1: "one seed", 2: "two seeds"}
LONGEST = 140  # characters of a short verdict with its label: two lines of a terminal
ANSWERS = {"not worse": "yes", "worse": "no"}
BRIEF = ("quality", "margin", "equal cost")  # subjects that a short verdict shows first
EQUAL_COST: dict[Outcome, str] = {
    "no statement": "too few seeds for dense of equal cost",
    "no difference shown": "no difference from dense of equal cost was shown",
    "differs": "differs from dense of equal cost",
}


def say_all(statements: Sequence[Statement]) -> str:
    """Return statements as one sentence, with a full stop."""
    return "; ".join(map(say, statements)) + "."


def say_briefly(label: str, statements: Sequence[Statement]) -> str:
    """Return one sentence on a group: quality, margin, equal cost, and as many doubts as two lines hold, the most
    serious first. Intervals are left to the table beside it. The sentence says where the rest is."""
    asked = [say_without_interval(one) for one in statements if one.subject in BRIEF]
    doubts = [say(one) for one in reversed(statements) if one.subject == "circumstance"]
    said = (asked or doubts)[:1]
    rest = [*asked, *doubts][1:]
    for text in rest:
        if len("; ".join([label, *said, text])) <= LONGEST:
            said.append(text)
    left = len(rest) + 1 - len(said)
    return "; ".join(said) + (f"; --all has {left} more remark{'s' * (left > 1)}" if left > 0 else "") + "."


def say_without_interval(statement: Statement) -> str:
    """Return a statement in the shortest words."""
    if statement.subject == "equal cost":
        return EQUAL_COST.get(statement.outcome, f"{statement.outcome} than dense of equal cost")
    if statement.subject == "quality" and statement.numbers:
        return ", ".join([*statement.reasons, _level(statement, "")])
    return say(statement)


def say(statement: Statement) -> str:
    """Return one statement in words, without a full stop."""
    return SAY[statement.subject](statement)


def _quality(statement: Statement) -> str:
    if not statement.numbers:
        return f"{statement.reasons[0]}: no statement about quality" if statement.reasons else "no quality to compare"
    return ", ".join([*statement.reasons, _level(statement, f" ({_describe_interval(statement)})")])


def _level(statement: Statement, inside: str) -> str:  # noqa: PLR0911 - one sentence an outcome
    """Describe a metric against the baseline's. ``inside`` is its interval in brackets, or empty."""
    number, outcome, margin = statement.numbers[0], statement.outcome, statement.number("margin")
    name, size = number.name, f"{number.value:+.2g} in {number.name}"
    few = number.count < FEWEST_PAIRS or number.low is None
    match outcome:
        case "exact":
            return f"exact: what differs is rounding ({size})"
        case "fault":
            how = f" ({_count(number)})" if few else inside
            return f"declared exact, but {size}{how} is far more than rounding: an error in the policy or in SparseBP"
        case "identical":
            return f"{name} is identical on all {number.count} seeds"
        case "equal within the margin":
            within = f"of {margin.value:g}" if margin else ""
            return f"{name} is equal within the margin {within}{_within(statement)}{inside}"
        case "no difference shown":
            return f"no difference in {name} was shown{inside and f'{inside}, which is not proof of equality'}"
        case "differs":
            return f"{name} differs by {number.value:+.3g}{inside}"
        case "no statement" if few:
            return f"{_count(number)}: no statement about quality"
        case "no statement" if number.p is None:
            same = f"differs by the same {number.value:+.3g} on all {number.count} seeds"
            return f"{name} {same}: the seed changes nothing, so there is no statement"
        case "no statement":
            lost = "but others diverged, so there is no statement about quality"
            return f"{name} differs by {number.value:+.3g}{inside}, {lost}"
    more = f", not shown to be more than the margin of {margin.value:g}" if margin else ""
    return f"{name} is {outcome} by {abs(number.value):.3g}{inside}{more}"


def _within(statement: Statement) -> str:
    """Describe how much better or worse it was shown to be, though within the margin."""
    found = (statement.number(word) for word in ("worse by", "better by"))
    return next((f", {number.name} {number.value:.3g}" for number in found if number is not None), "")


def _count(number: Number) -> str:
    waits = f"{number.count} shared seeds, but some planned runs have not ended"
    return COUNTS.get(number.count, waits if number.count else "no shared seed")


def _describe_interval(statement: Statement) -> str:
    """Describe the interval. If Holm's procedure ends it at zero, which is not a measured end, add its p value."""
    number = statement.numbers[0]
    kind = "simultaneous 95% interval" if number.simultaneous else "95% interval"
    p = f"p = {number.p:.2g}, " if number.p is not None and 0.0 in {number.low, number.high} else ""
    return f"{kind} {show_ends(number.low, number.high)}, {p}{number.count} seeds"


def _examples(statement: Statement) -> str:
    number, (where,) = statement.numbers[0], statement.reasons
    inside = show_ends(number.low, number.high)
    if statement.outcome not in {"lower", "higher"}:
        return f"{where} is not shown to differ in loss ({inside})"
    word = "a larger" if statement.outcome == "higher" else "a smaller"
    return f"{where} has {word} loss by {abs(number.value):.3g} ({inside})"


def _margin(statement: Statement) -> str:
    answer = ANSWERS.get(statement.outcome, statement.outcome)
    why = f" ({'; '.join(statement.reasons)})" if statement.reasons else ""
    return f"not worse by more than the margin of {statement.numbers[0].value:g}: {answer}{why}"


def _step_time(statement: Statement) -> str:
    if not statement.numbers:
        if statement.reasons:
            return f"no statement about step time: {statement.reasons[0]}"
        overlap = statement.outcome == "no difference shown"
        return "step times overlap: neither is clearly faster" if overlap else "no step times to compare"
    return ": ".join([_ratio("step time", statement), *statement.reasons])


def _ratio(what: str, statement: Statement) -> str:
    """Describe the ratio of two runs as a change."""
    number = statement.numbers[0]
    change = show_change(number.value, number.low, number.high)
    match statement.outcome:
        case "identical":
            return f"{what} is equal"
        case "no difference shown":
            return f"no difference in {what} was shown ({change})"
    return f"{what} {change}" if number.low is not None else f"{what} {change} in these runs"


def _cost(statement: Statement) -> str:
    number = statement.numbers[0]
    return f"cost {show_ratio(number.value, number.low, number.high)} of the baseline's FLOPs"


def _against(statement: Statement) -> str:
    (against,) = statement.reasons
    if statement.outcome == "no statement":
        return against
    number = statement.numbers[0]
    inside = show_ends(number.low, number.high)
    match statement.outcome:
        case "no difference shown":
            return f"no difference from {against} was shown ({inside})"
        case "differs":
            return f"differs from {against} by {number.value:+.3g} ({inside})"
    return f"{statement.outcome} than {against}, by {abs(number.value):.3g} ({inside})"


SAY: dict[Subject, Callable[[Statement], str]] = {
    "quality": _quality,
    "common step": _quality,
    "examples": _examples,
    "margin": _margin,
    "cost": _cost,
    "step time": _step_time,
    "memory": lambda statement: _ratio("memory held by a step", statement),
    "random": _against,
    "equal cost": _against,
    "circumstance": lambda statement: statement.reasons[0],
}
