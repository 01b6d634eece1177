"""Studies of known truth, drawn with a seed, and how often what `compare` says of them is wrong or right.

Each function here fills one table of `benchmarks/verdicts.py`. Noise of a run has standard deviation 1, so a difference
of two runs has 1.41; effects and margins are in standard deviations of such a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sparsebp_cli.compare.choose import RunCandidate, describe_left_out
from sparsebp_cli.compare.example import correct_examples
from sparsebp_cli.compare.family import correct_all, correct_family
from sparsebp_cli.compare.load import mark_repeats
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.margin import decide_all, withhold
from sparsebp_cli.compare.measured import ExampleDifference
from sparsebp_cli.compare.statistics import (
    Difference,
    paired_difference,
    paired_ratio,
    summarise,
    summarise_clusters,
)
from sparsebp_cli.compare.verdict import differs
from sparsebp_cli.run import History, State

Draw = np.random.Generator
Row = tuple[str, ...]
PAIR = math.sqrt(2.0)  # standard deviation of a difference of two runs
SIZES = [(n, k) for n in (3, 5, 10) for k in (1, 5, 10)]


def noise(draw: Draw, kind: str, *shape: int) -> np.ndarray:
    """Draw noise with mean 0 and standard deviation 1."""
    match kind:
        case "heavy":
            return np.asarray(draw.standard_t(3, size=shape) / math.sqrt(3))
        case "skewed":
            return np.asarray((np.exp(draw.normal(size=shape)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e))
    return np.asarray(draw.normal(size=shape))


def seeded(values: Iterable[float]) -> dict[int, float]:
    """Number values by seed."""
    return dict(enumerate(map(float, values)))


def study(  # one quality of k groups and a baseline
    draw: Draw,
    n: int,
    k: int,
    effect: float = 0.0,
    kind: str = "normal",
    spread: Sequence[float] = (),
    base: float = 1.0,
) -> list[Difference | None]:
    """Draw the differences of k groups to one baseline; the effect is the first group's, in standard deviations."""
    scale = np.array([*spread, *[1.0] * (k - len(spread))])
    baseline = base * noise(draw, kind, n)
    values = scale[:, None] * noise(draw, kind, k, n)
    values[0] += effect * math.sqrt(scale[0] ** 2 + base**2)
    return [paired_difference(seeded(row), seeded(baseline)) for row in values]


def share(studies: int, predicate: Callable[[Draw], bool], start: int = 0) -> str:
    """The share of simulated studies for which a predicate holds."""
    return f"{sum(predicate(np.random.default_rng([start, s])) for s in range(studies)) / studies:.3f}"


def covers(low: float | None, high: float | None, truth: float) -> bool:
    return low is not None and high is not None and low <= truth <= high


def coverage(studies: int) -> list[Row]:
    """Intervals that contain the truth."""

    def one(draw: Draw, n: int, kind: str, base: float = 1.0) -> bool:
        d = study(draw, n, 1, kind=kind, base=base)[0]
        return d is not None and covers(d.low, d.high, 0.0)

    def ratio(draw: Draw, n: int) -> bool:
        d = paired_ratio(*(seeded(np.exp(0.05 * noise(draw, "normal", n))) for _ in range(2)))
        return d is not None and covers(d.low, d.high, 1.0)

    def together(draw: Draw, n: int, k: int, effect: float) -> bool:
        found = correct_family([study(draw, n, k, effect)], ratios=[False])[0]
        truths = [effect * PAIR, *[0.0] * (k - 1)]
        return all(d is not None and covers(d.family_low, d.family_high, t) for d, t in zip(found, truths, strict=True))

    rows = [
        (f"interval of one group, {kind} noise", f"{n}", "1", share(studies, lambda d, n=n, kind=kind: one(d, n, kind)))  # type: ignore[misc]
        for kind in ("normal", "heavy", "skewed")
        for n in (3, 5, 10)
    ]
    rows += [
        (
            "the same, skewed, beside a baseline without noise",
            f"{n}",
            "1",
            share(studies, lambda d, n=n: one(d, n, "skewed", 0.0)),
        )  # type: ignore[misc]
        for n in (3, 5, 10)
    ]
    rows += [("interval of a ratio", f"{n}", "1", share(studies, lambda d, n=n: ratio(d, n))) for n in (3, 5, 10)]  # type: ignore[misc]
    rows += [
        (
            f"all simultaneous intervals{', one true effect of 3' * bool(effect)}",
            f"{n}",
            f"{k}",
            share(studies, lambda d, n=n, k=k, e=effect: together(d, n, k, e)),  # type: ignore[misc]
        )
        for effect in (0.0, 3.0)
        for n, k in SIZES
        if k > 1
    ]
    return rows


def null_family(studies: int) -> list[Row]:
    """Reports of quality, step time and memory in which nothing differs but a difference is stated."""
    scenes: dict[str, dict[str, Any]] = {
        "equal noise": {},
        "one group varies 3 times as much": {"spread": (3.0,)},
        "the baseline varies 3 times as much": {"base": 3.0},
        "the baseline varies 10 times as much": {"base": 10.0},
        "heavy tails (t, 3 df)": {"kind": "heavy"},
        "skewed (lognormal)": {"kind": "skewed"},
        "skewed, beside a baseline without noise": {"kind": "skewed", "base": 0.0},
    }

    def false(draw: Draw, n: int, k: int, scene: dict[str, Any]) -> tuple[bool, bool]:
        kinds = [study(draw, n, k, **scene) for _ in range(3)]
        three, one = (correct_family(some, ratios=[False] * len(some)) for some in (kinds, kinds[:1]))
        return any(differs(d) for some in three for d in some), any(map(differs, one[0]))

    rows = []
    for name, scene in scenes.items():
        for n, k in SIZES:
            found = [false(np.random.default_rng(s), n, k, scene) for s in range(studies)]
            rows.append(
                (name, f"{n}", f"{k}", *(f"{sum(column) / studies:.3f}" for column in zip(*found, strict=True)))
            )
    return rows


def power(studies: int) -> list[Row]:
    """An effect of 3 standard deviations of a difference, in one group."""

    def found(draw: Draw, n: int, k: int, shared: bool) -> bool:
        some = study(draw, n, k, 3.0)
        return differs((correct_family([some], ratios=[False])[0] if shared else correct_all(some))[0])

    return [
        (
            f"{n}",
            f"{k}",
            share(studies, lambda d, n=n, k=k: found(d, n, k, shared=True)),  # type: ignore[misc]
            share(studies, lambda d, n=n, k=k: found(d, n, k, shared=False)),  # type: ignore[misc]
        )
        for n, k in SIZES
    ]


def margins(studies: int) -> list[Row]:
    """Answers on a margin of one standard deviation, all groups alike: wrong ones at its edge, right ones at 0."""

    def decide(draw: Draw, n: int, k: int, truth: float) -> tuple[bool, bool, bool]:
        baseline = seeded(noise(draw, "normal", n))
        some = [paired_difference(seeded(noise(draw, "normal", n) + truth * PAIR), baseline) for _ in range(k)]
        shared = correct_family([some], ratios=[False])[0]
        found = [d for d in decide_all(shared, PAIR, worse_is_up=True) if d is not None]
        kinds = (lambda d: d.answer != "inconclusive", lambda d: d.answer == "yes", lambda d: d.equivalent == "yes")
        any_answer, any_yes, any_equal = (any(map(predicate, found)) for predicate in kinds)
        return any_answer, any_yes, any_equal

    rows = []
    for n, k in SIZES:
        at, beyond, zero = (
            [
                sum(column) / studies
                for column in zip(*(decide(np.random.default_rng(s), n, k, truth) for s in range(studies)), strict=True)
            ]
            for truth in (1.0, -1.0, 0.0)
        )
        shown = (at[0], at[2], beyond[2], zero[1], zero[2])
        rows.append((f"{n}", f"{k}", *(f"{x:.3f}" for x in shown)))
    return rows


def looking(studies: int) -> list[Row]:
    """Truth on the margin, where any answer is wrong; and truth at 0, where yes is right. One group."""

    def every_seed(draw: Draw, most: int, truth: float) -> tuple[bool, bool]:
        values = noise(draw, "normal", most, 2) @ np.array([1.0, -1.0]) + truth * PAIR
        stated = {"answer": False, "anytime": False}
        for n in range(3, most + 1):
            difference = paired_difference(seeded(values[:n]), dict.fromkeys(range(n), 0.0))
            decision = decide_all([difference], PAIR, worse_is_up=True)[0]
            for kind in stated:
                stated[kind] |= decision is not None and getattr(decision, kind) != "inconclusive"
        return stated["answer"], stated["anytime"]

    rows = []
    for most in (10, 30):
        for truth, word in ((1.0, "wrong"), (0.0, "decided")):
            found = [every_seed(np.random.default_rng(s), most, truth) for s in range(studies)]
            one, any_look = (f"{sum(column) / studies:.3f}" for column in zip(*found, strict=True))
            rows += [
                (f"`compare` after every seed, the answer of one look: {word}", f"{most}", one),
                (f"`compare` after every seed, the answer at any look: {word}", f"{most}", any_look),
            ]
    return rows


def examples(studies: int) -> list[Row]:
    """Two models of one seed that do not differ, on 200 held-out examples from 20 documents, in each group."""

    def stated(draw: Draw, k: int, correlation: float, how: str) -> bool:
        found = []
        for _ in range(k):
            shared = np.repeat(draw.normal(size=20), 10)
            values = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * draw.normal(size=200)
            clusters = {"documents": np.arange(200) // 10, "blocks": np.arange(200) // 20}
            listed = [float(value) for value in values]
            difference = summarise(listed) if how == "none" else summarise_clusters(listed, list(clusters[how]))
            found.append((ExampleDifference(0, difference, 0.5),))
        if how == "none":
            return any((entry.difference.p or 1.0) < 0.05 for (entry,) in found)
        return any(differs(entry.difference) for (entry,) in correct_examples(found))

    return [
        (
            f"{correlation:g}",
            f"{k}",
            *(share(studies, lambda d, k=k, c=correlation, h=how: stated(d, k, c, h)) for how in HOW),
        )  # type: ignore[misc]
        for correlation in (0.0, 0.5)
        for k in (1, 5, 10)
    ]


HOW = ("documents", "blocks", "none")


def divergence(studies: int) -> list[Row]:
    """A policy that is better by one standard deviation where it survives: how often the answer is yes."""

    def opens(draw: Draw, n: int, chance: float, shut: bool) -> bool:
        values, baseline = noise(draw, "normal", n) - PAIR, noise(draw, "normal", n)
        alive = draw.random(n) >= chance
        kept = {s: v for s, v in seeded(values).items() if alive[s]}
        decision = decide_all([paired_difference(kept, seeded(baseline))], PAIR, worse_is_up=True)[0]
        decision = withhold(decision, PAIR, int((~alive).sum()), 0) if shut else decision
        return decision is not None and decision.answer == "yes" and not alive.all()

    return [
        (
            f"{n}",
            f"{chance:g}",
            *(share(studies, lambda d, n=n, c=chance, s=s: opens(d, n, c, s)) for s in (True, False)),
        )  # type: ignore[misc]
        for n in (5, 10)
        for chance in (0.2, 0.5)
    ]


def selection(studies: int) -> list[Row]:
    """Nothing differs, and runs are repeated or chosen until something does: any statement of better or worse."""

    def makes_statement(values: Sequence[float], baseline: Sequence[float]) -> bool:
        return differs(correct_family([[paired_difference(seeded(values), seeded(baseline))]], ratios=[False])[0][0])

    def repeated(draw: Draw, n: int, tries: int, best: bool) -> bool:
        baseline, values = noise(draw, "normal", n), noise(draw, "normal", tries, n)
        if best:  # keep the best run of each seed
            return makes_statement([float(x) for x in values.min(axis=0)], [float(x) for x in baseline])
        runs = [
            LoadedRun(f"{t}-{s}", "policy", s, "group", {}, float(t), History(), State.FINISHED)
            for t in range(tries)
            for s in range(n)
        ]
        mark_repeats(runs)
        counted = {run.seed: float(values[int(run.created), run.seed or 0]) for run in runs if not run.repeats}
        return makes_statement([counted[s] for s in range(n)], [float(x) for x in baseline])

    def chosen(draw: Draw, n: int, most: int) -> tuple[bool, bool]:
        values, baseline = noise(draw, "normal", most), noise(draw, "normal", most)
        kept = np.argsort(values - baseline)[:n]
        there = [
            RunCandidate(f"{name}-{s}", name, 0.0, {"model": name, "training": {"seed": s}}, {}, _no_run)
            for name in ("policy", "dense")
            for s in range(most)
        ]
        taken = [run for run in there if run.recipe["training"]["seed"] in kept]
        stated = makes_statement([float(values[s]) for s in kept], [float(baseline[s]) for s in kept])
        return stated, stated and len(describe_left_out(there, taken)) < 2

    rows = []
    for n in (3, 5, 10):
        for tries in (3, 10):
            row = [share(studies, lambda d, n=n, t=tries, b=b: repeated(d, n, t, b)) for b in (False, True)]  # type: ignore[misc]
            rows.append((f"every seed run {tries} times", f"{n}", *row))
    for n, most in ((3, 5), (3, 10), (5, 10)):
        found = [chosen(np.random.default_rng(s), n, most) for s in range(studies)]
        stated, unmarked = (sum(column) / studies for column in zip(*found, strict=True))
        rows.append((f"the best {n} of {most} seeds chosen", f"{n}", f"{unmarked:.3f}", f"{stated:.3f}"))
    return rows


def _no_run() -> LoadedRun:
    raise AssertionError("its recipe and its seed are enough")
