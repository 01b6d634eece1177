"""Simulates whole studies whose arms are all the same method: tune, extend, train fresh seeds, state.

    python benchmarks/tuning.py           # about twelve minutes on one core; writes docs/results/tuning.txt
    python benchmarks/tuning.py --tiny    # the same code in seconds; prints, and writes nothing
    python benchmarks/tuning.py --unequal # a grid whose corners differ sixfold in noise; writes tuning-unequal.json

Statements are those of `sparsebp compare`: its functions pool spreads, correct for the number of statements, and add
the error of what tuning chose. A study has 3 dense arms, of which the best on validation is the baseline, and 7
policies; or one and one. Losses are in standard deviations of a run over seeds, of which half is common to all arms of
a seed. The metric of validation has a noise of its own, as that of a few hundred examples has.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from checkout import ROOT, use_checkout

use_checkout()

import numpy as np  # noqa: E402

from sparsebp_cli.compare.family import correct_family  # noqa: E402
from sparsebp_cli.compare.statistics import add_choice, paired_difference, withhold_statement  # noqa: E402
from sparsebp_cli.compare.verdict import differs  # noqa: E402
from sparsebp_lab.study.choice import find_choice_errors  # noqa: E402
from sparsebp_lab.study.schema import SearchSection  # noqa: E402

PAGE = ROOT / "docs" / "results" / "tuning.txt"
UNEQUAL = ROOT / "benchmarks" / "results" / "tuning-unequal.json"
SHARED = 0.5  # of a run's variance, what the seed does to all arms
ADDED = SearchSection().extend

Landscape = Callable[[int], float]  # the true loss of a value, by its place on the grid


def _two(gap: float) -> Landscape:
    return lambda place: 0.0 if place == 0 else gap


LANDSCAPES: dict[str, tuple[Landscape, range, bool]] = {  # with the first grid, and whether it is extended
    "one value": (_two(0.0), range(1), False),
    "0, 1": (_two(1.0), range(2), False),
    "0, 2": (_two(2.0), range(2), False),
    "2, 0, 2": (_two(2.0), range(-1, 2), False),
    "flat bowl": (lambda place: 0.5 * (place - 0.3) ** 2, range(-1, 2), True),
    "steep, off": (lambda place: 1.5 * (place - 3.4) ** 2, range(-1, 2), True),
}


@dataclass(frozen=True)
class Setting:
    """One line of a table."""

    landscape: str
    noise: float  # of the validation metric
    dense: int
    policies: int
    seeds: int  # of the report


def tune(draw: np.random.Generator, setting: Setting, num_seeds: int) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the places of the grid, and each arm's validation losses by place and seed. While an arm's best is at an
    edge, all arms get one more value there."""
    truth, grid, extends = LANDSCAPES[setting.landscape]
    arms = setting.dense + setting.policies
    of_seed = math.sqrt(SHARED) * draw.standard_normal(num_seeds)

    def losses(place: int) -> np.ndarray:
        run = math.sqrt(1.0 - SHARED) * draw.standard_normal((arms, num_seeds))
        noise: np.ndarray = truth(place) + of_seed + run + setting.noise * draw.standard_normal((arms, num_seeds))
        return noise

    found = {place: losses(place) for place in grid}
    while extends:
        order = sorted(found)
        best = {order[np.argmin([found[place][arm].mean() for place in order])] for arm in range(arms)}
        new = [order[0] - 1] * (order[0] in best and grid[0] - order[0] < ADDED)
        new += [order[-1] + 1] * (order[-1] in best and order[-1] - grid[-1] < ADDED)
        if not new:
            break
        found |= {place: losses(place) for place in new}
    order = sorted(found)
    return order, {str(arm): np.stack([found[place][arm] for place in order]) for arm in range(arms)}


def state(
    test: np.ndarray, base: int, errors: dict[str, float], *, lost: np.ndarray | None = None
) -> list[tuple[int, float]]:
    """Return the arms of which a difference to the baseline is stated, with its mean; ``lost`` marks the runs that
    diverged, which are in no mean."""
    arms = [arm for arm in range(len(test)) if arm != base]
    kept = np.ones(test.shape, bool) if lost is None else ~lost
    differences = []
    for arm in arms:
        here, there = ({n: float(test[one][n]) for n in np.flatnonzero(kept[one])} for one in (arm, base))
        difference = paired_difference(here, there)
        if difference is not None:
            difference = add_choice(difference, math.hypot(errors[str(arm)], errors[str(base)]))
            if (lost is not None) and not kept[arm if difference.mean < 0.0 else base].all():
                difference = withhold_statement(difference)
        differences.append(difference)
    (corrected,) = correct_family([differences], ratios=[False])
    return [(arm, d.mean) for arm, d in zip(arms, corrected, strict=True) if d is not None and differs(d)]


def study(
    number: int, setting: Setting, num_tuned: int, *, adds_choice: bool, effect: float = 0.0
) -> tuple[bool, float]:
    """Simulate one study. Return whether anything is stated, and the share of the policies of which something is."""
    draw = np.random.default_rng([35, number])
    truth = LANDSCAPES[setting.landscape][0]
    order, losses = tune(draw, setting, num_tuned)
    zero = dict.fromkeys(losses, 0.0)
    errors = find_choice_errors(losses, losses) if adds_choice else zero
    mean = np.array([truth(order[by.mean(1).argmin()]) for by in losses.values()])
    mean[setting.dense :] -= effect
    of_seed = math.sqrt(SHARED) * draw.standard_normal(setting.seeds)
    test = mean[:, None] + of_seed + math.sqrt(1.0 - SHARED) * draw.standard_normal((len(mean), setting.seeds))
    validation = test + setting.noise * draw.standard_normal(test.shape)
    base = int(validation[: setting.dense].mean(1).argmin())
    stated = state(test, base, errors)
    of_policies = [arm for arm, _ in stated if arm >= setting.dense]
    return bool(stated), len(of_policies) / setting.policies


def study_unequal(number: int, slope: float, effect: float = 0.0) -> tuple[bool, float]:
    """Simulate a study over 12 combinations whose noise grows sixfold from the first to the last, three seeds of tuning
    and five of the report, 3 dense arms and 7 policies that are better by ``effect``. Return as :func:`study`."""
    draw = np.random.default_rng([38, number])
    spread, truth, arms = np.geomspace(1.0, 6.0, 12), slope * np.arange(12.0), 10

    def train(combinations: np.ndarray, seeds: int) -> np.ndarray:
        noise = math.sqrt(1.0 - SHARED) * draw.standard_normal((*combinations.shape, seeds))
        run: np.ndarray = noise + math.sqrt(SHARED) * draw.standard_normal(seeds)
        return truth[combinations][..., None] + spread[combinations][..., None] * run

    tuned = train(np.tile(np.arange(12), (arms, 1)), 3)
    losses = {str(arm): tuned[arm] for arm in range(arms)}
    best = tuned.mean(2).argmin(1)
    test = train(best, 5)
    test[3:] -= effect
    base = int((test + 0.3 * draw.standard_normal(test.shape))[:3].mean(1).argmin())
    stated = state(test, base, find_choice_errors(losses, losses))
    return bool(stated), sum(arm >= 3 for arm, _ in stated) / 7


def write_unequal(count: int) -> str:
    """Return what a grid of unequal noise gives, as JSON."""
    rows = []
    for slope in (0.0, 0.3, 1.0):
        false = share([study_unequal(number, slope)[0] for number in range(count)])
        power = {by: share([study_unequal(n, slope, by)[1] for n in range(count // 5)]) for by in (2.0, 4.0)}
        rows.append({"slope": slope, "false": false, "power_2": power[2.0], "power_4": power[4.0]})
        print(rows[-1], flush=True)
    return json.dumps({"date": date.today().isoformat(), "studies": count, "rows": rows}, indent=1) + "\n"


def look_after_every_seed(number: int, *, waits: bool) -> bool:
    """Return whether one of the looks after 3 to 10 seeds of 7 policies that are all dense states anything. ``waits``:
    as a study does, which states nothing before its last planned seed."""
    draw = np.random.default_rng([36, number])
    test = math.sqrt(SHARED) * draw.standard_normal(10) + math.sqrt(1 - SHARED) * draw.standard_normal((8, 10))
    zero = {str(arm): 0.0 for arm in range(8)}
    return any(state(test[:, :n], 0, zero) for n in ([10] if waits else range(3, 11)))


def lose_a_third(number: int, seeds: int, *, withholds: bool) -> bool:
    """Return whether the survivors of a policy that is dense, whose worst third of seeds diverge, are called better."""
    draw = np.random.default_rng([37, number])
    test = math.sqrt(SHARED) * draw.standard_normal(seeds) + math.sqrt(1 - SHARED) * draw.standard_normal((2, seeds))
    worst = test[1].argsort()[-(seeds // 3) :]
    lost = np.zeros(test.shape, bool)
    lost[1, worst] = True
    if withholds:
        return any(mean < 0 for _, mean in state(test, 0, {"0": 0.0, "1": 0.0}, lost=lost))
    left = np.setdiff1d(np.arange(seeds), worst)
    return any(mean < 0 for _, mean in state(test[:, left], 0, {"0": 0.0, "1": 0.0}))


def share(of: Sequence[bool | float]) -> float:
    """Return the mean."""
    return float(np.mean([float(one) for one in of]))


def again(setting: Setting, ours: float, count: int) -> str:
    """Simulate a line above the bound with more studies, since one of many lines is above it by chance."""
    found = share([study(n, setting, 3, adds_choice=True)[0] for n in range(count)])
    line = f"{setting.landscape}, noise {setting.noise}, {setting.dense}+{setting.policies} arms, {setting.seeds} seeds"
    return (
        f"Above the bound: {line}: {ours:.3f}; in {count:,} studies {found:.3f}"
        f" (at most 0.05 + {math.sqrt(0.05 * 0.95 / count):.3f})."
    )


def write(count: int) -> str:
    """Return the page."""
    error = math.sqrt(0.05 * 0.95 / count)
    lines = [
        f"{count:,} simulated studies a line (benchmarks/tuning.py). All arms are the same method: every statement is",
        f"false, and their share is to be at most 0.05 + {error:.3f}, its standard error there.",
        "1 seed: tuned with one seed, its choice in no error. 3 seeds: the same with three. study: tuned with three,",
        "and the error of the choice in every statement, as `sparsebp compare --study` does. Power: share of the",
        "policies of which anything is stated if all are better by 2 and by 4 standard deviations of a run.",
        "",
        f"{'true losses':12} {'noise':>5} {'arms':>6} {'seeds':>5} {'1 seed':>7} {'3 seeds':>8} {'study':>7}"
        f" {'power 2':>8} {'power 4':>8}",
    ]
    above: list[tuple[Setting, float]] = []
    for dense, policies in ((3, 7), (1, 1)):
        for seeds in (3, 5):
            for name in LANDSCAPES:
                for noise in (0.3, 2.0):
                    setting = Setting(name, noise, dense, policies, seeds)
                    today, three, ours = (
                        share([study(n, setting, k, adds_choice=adds)[0] for n in range(count)])
                        for k, adds in ((1, False), (3, False), (3, True))
                    )
                    if ours > 0.05 + error:
                        above.append((setting, ours))
                    few = max(1, count // 5)
                    power = [
                        share([study(n, setting, 3, adds_choice=True, effect=by)[1] for n in range(few)])
                        for by in (2.0, 4.0)
                    ]
                    lines.append(
                        f"{name:12} {noise:5} {f'{dense}+{policies}':>6} {seeds:5} {today:7.3f} {three:8.3f}"
                        f" {ours:7.3f} {power[0]:8.2f} {power[1]:8.2f}"
                    )
                    print(lines[-1], flush=True)
    lines += ["", *(again(setting, ours, 10 * count) for setting, ours in above)] if above else []
    looks = [share([look_after_every_seed(n, waits=waits) for n in range(count)]) for waits in (False, True)]
    lines += [
        "",
        f"A look after every seed from 3 to 10: {looks[0]:.3f}; one, after the last planned seed: {looks[1]:.3f}.",
    ]
    for seeds in (6, 9):
        lost = [share([lose_a_third(n, seeds, withholds=w) for n in range(count)]) for w in (False, True)]
        lines.append(
            f"The worst third of {seeds} seeds diverge, the survivors are called better: {lost[0]:.3f}; with nothing "
            f"stated in favour of survivors: {lost[1]:.3f}."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="ten studies a line; writes nothing")
    parser.add_argument("--unequal", action="store_true", help="1,000 studies of a grid of unequal noise alone")
    arguments = parser.parse_args()
    if arguments.unequal:
        UNEQUAL.write_text(write_unequal(1000), encoding="utf-8")
        return
    text = write(10 if arguments.tiny else 1000)
    if arguments.tiny:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
