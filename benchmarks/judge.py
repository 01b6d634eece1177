"""Simulates nights of proposals under several rules: what is kept in error, what is found, and what it costs.

    python benchmarks/judge.py           # about ten minutes on one core; writes benchmarks/results/judge.json
    python benchmarks/judge.py --tiny    # the same code in seconds; prints, and writes nothing

The judge is that of `sparsebp judge`: its own functions give stakes, levels, the screen and the spread of pairs.
Losses are in standard deviations of a run over seeds; a share of their variance is common to all runs of one seed. A
night has 100 proposals. Costs are runs a proposal; the naive rule trains one.
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date

from checkout import ROOT, use_checkout

use_checkout()

import numpy as np  # noqa: E402

from sparsebp_lab.judge.bet import Floats, find_stake  # noqa: E402
from sparsebp_lab.judge.level import LEVEL, find_needed  # noqa: E402
from sparsebp_lab.judge.move import AGAINST, FUTILE, MOST_PAIRS, WORST  # noqa: E402
from sparsebp_lab.judge.screen import DROP, FIRST_RUNS, MOST_RUNS, NARROWEST, PASS, PRIOR_PAIRS, WIDEST  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PROPOSALS = 100
GAIN_PAIRS = 4


@dataclass(frozen=True)
class World:
    """What is simulated."""

    name: str
    share: float = 0.0  # of proposals that are better
    effect: float = 1.0  # their gain
    common: float = 0.0  # share of the variance that all runs of one seed have in common
    alike: float = 0.0  # share of the rest that a proposal shares with the one before: a dependent line
    climbs: bool = False  # what is kept becomes the baseline
    hopeful: bool = False  # proposes real gains only while the screen's runs of the baseline look good, else nulls
    noise: str = "normal"
    ruin: tuple[float, float] | None = None  # share of a candidate's seeds that lose, and by how much; others gain
    drift: float = 0.0  # what a candidate with ruins gains in the mean
    quiet: float = 1.0  # own noise of a candidate beside that of the baseline
    diverges: float = 0.0  # share of a candidate's runs that diverge

    def draw_own(self, draw: np.random.Generator, *shape: int) -> Floats:
        """Draw what is a candidate's own beside its seed's noise: mean ``-drift``, infinite where a run diverges."""
        own = self.quiet * math.sqrt(1.0 - self.common) * draw_noise(draw, self.noise, *shape)
        if self.ruin is not None:
            share, depth = self.ruin
            own += np.where(draw.random(shape) < share, depth, -(share * depth + self.drift) / (1.0 - share))
        return np.where(draw.random(shape) < self.diverges, math.inf, own)


@dataclass(frozen=True)
class Rule:
    """What of the judge is used."""

    name: str
    futility: float = FUTILE
    worst: float = WORST  # in standard deviations of a run


@dataclass
class Tally:
    """Counts over nights."""

    nights: int
    any_false: Floats
    found: float = 0.0
    real: float = 0.0
    runs_null: list[float] = field(default_factory=list)
    runs_real: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)  # gain minus truth of what was kept, by the pairs that decided
    fresh: list[float] = field(default_factory=list)  # the same by fresh pairs
    runs: float = 0.0

    def row(self) -> dict[str, float | None]:
        """Return what a table shows."""
        mean = {name: float(np.mean(getattr(self, name))) if getattr(self, name) else None for name in ROWS}
        power = self.found / self.real if self.real else None
        return {
            "false": float(np.mean(self.any_false)),
            "power": power,
            "cost": self.runs / self.nights / PROPOSALS,
            **mean,
        }


ROWS = ("runs_null", "runs_real", "seen", "fresh")


def draw_noise(draw: np.random.Generator, kind: str, *shape: int) -> Floats:
    """Draw noise with mean 0 and standard deviation 1."""
    if kind == "heavy":
        return np.asarray(draw.standard_t(3, size=shape) / math.sqrt(3))
    if kind == "heaviest":  # its variance is infinite
        return np.asarray(draw.standard_t(2, size=shape) / 2.0)
    if kind == "skewed":
        return np.asarray((np.exp(draw.normal(size=shape)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e))
    return np.asarray(draw.normal(size=shape))


class Nights:
    """Many nights at once: one ledger each."""

    def __init__(self, world: World, rule: Rule, nights: int, draw: np.random.Generator) -> None:
        self.world, self.rule, self.num, self.draw = world, rule, nights, draw
        self.tally = Tally(nights, np.zeros(nights))
        self.places = np.zeros(nights, dtype=int)  # taken
        self.last = np.zeros((nights, MOST_RUNS))  # own noise of the proposal before
        self.screened = np.zeros(nights)  # least gain of a pair of the screen
        self._new_baseline(np.ones(nights, dtype=bool))

    def _new_baseline(self, where: np.ndarray) -> None:
        """Draw the runs of the screen of a baseline: of those nights that have a new one."""
        if not hasattr(self, "base"):
            zeros = np.zeros(self.num)
            self.seed_noise, self.base = (np.zeros((self.num, MOST_RUNS)) for _ in range(2))
            self.squares, self.freedom, self.made = zeros.copy(), zeros.copy(), zeros.copy()
            self.sum_base, self.sum_squares = zeros.copy(), zeros.copy()
        common = self.draw.normal(size=(self.num, MOST_RUNS))
        own = draw_noise(self.draw, self.world.noise, self.num, MOST_RUNS)
        base = math.sqrt(self.world.common) * common + math.sqrt(1 - self.world.common) * own
        self.seed_noise[where], self.base[where] = common[where], base[where]
        self.squares[where] = self.freedom[where] = 0.0
        self.made[where] = FIRST_RUNS
        self.sum_base[where] = base[where, :FIRST_RUNS].sum(1)
        self.sum_squares[where] = (base[where, :FIRST_RUNS] ** 2).sum(1)
        self.tally.runs += FIRST_RUNS * int(where.sum())

    @property
    def run_spread(self) -> Floats:
        """Standard deviation of a run, by all runs of the baseline up to here."""
        around = self.sum_squares - self.sum_base**2 / self.made
        return np.sqrt(around / (self.made - 1))

    def pair_spread(self) -> Floats:
        """Standard deviation of a pair, as :meth:`sparsebp_lab.judge.screen.ScreenSquares.find_spread`."""
        return np.sqrt((2.0 * PRIOR_PAIRS * self.run_spread**2 + self.squares) / (PRIOR_PAIRS + self.freedom))

    def propose(self) -> tuple[np.ndarray, Floats]:
        """Return which proposals are better, and the losses of their runs in the screen."""
        world = self.world
        real = self.draw.random(self.num) < world.share
        if world.hopeful:  # it has seen the baseline's runs, and knows when they are lucky
            real &= self.base[:, :2].mean(1) < 0.0
        own = world.draw_own(self.draw, self.num, MOST_RUNS)
        if world.alike:
            own = math.sqrt(world.alike) * self.last + math.sqrt(1 - world.alike) * own
        self.last = own
        loss = math.sqrt(world.common) * self.seed_noise + own
        return real, loss - np.where(real, world.effect, 0.0)[:, None]

    def screen(self, loss: Floats, effect: Floats, spread: Floats, runs: Floats) -> np.ndarray:
        """Return which candidates pass, and count their runs and pairs."""
        gains, odds = self.base - loss, np.zeros(self.num)
        live, passed = np.ones(self.num, dtype=bool), np.zeros(self.num, dtype=bool)
        for number in range(MOST_RUNS):
            runs += live
            odds = np.where(live, odds + effect * (gains[:, number] - effect / 2.0) / spread**2, odds)
            self._pay_baseline(live, number)
            passed |= live & (odds >= PASS)
            live &= (odds > DROP) & (odds < PASS)
        passed |= live & (odds > 0.0)
        passed &= np.isfinite(gains).all(1)  # one that diverges is worse
        gains = np.where(np.isfinite(gains), gains, 0.0)
        self.screened = gains.min(1)
        used = np.arange(MOST_RUNS)[None] < runs[:, None]
        mean = (gains * used).sum(1) / runs
        self.squares += ((gains - mean[:, None]) ** 2 * used).sum(1)
        self.freedom += runs - 1
        return passed

    def _pay_baseline(self, live: np.ndarray, number: int) -> None:
        """Let a night's baseline have as many runs as its longest screen."""
        new = live & (self.made <= number)
        self.made += new
        self.sum_base += np.where(new, self.base[:, number], 0.0)
        self.sum_squares += np.where(new, self.base[:, number] ** 2, 0.0)
        self.tally.runs += int(new.sum())

    def decide(self, passed: np.ndarray, truth: Floats, effect: Floats, runs: Floats) -> np.ndarray:
        """Return which candidates are kept, by pairs of fresh seeds."""
        needed = np.array([find_needed(place) for place in range(1, self.places.max() + 2)])[self.places]
        spread = effect / np.clip(effect / self.pair_spread(), NARROWEST, WIDEST)
        worst = self.rule.worst * self.run_spread
        total, squares, won, lost, odds = (np.zeros(self.num) for _ in range(5))
        kept, wide = np.zeros(self.num, dtype=bool), math.sqrt(1.0 - self.world.common)
        active = np.flatnonzero(passed & (self.screened > -worst))
        for count in range(1, MOST_PAIRS + 1):
            if not len(active):
                break
            base = wide * draw_noise(self.draw, self.world.noise, len(active))
            gain = truth[active] + base - self.world.draw_own(self.draw, len(active))
            runs[active] += 2
            given = (squares[active], effect[active], spread[active], worst[active])
            clipped = np.clip(gain, -worst[active], worst[active])
            won[active] += np.log1p(find_stake(total[active], *given) * clipped)
            lost[active] += np.log1p(-find_stake(-total[active], *given) * clipped)
            total[active] += clipped
            squares[active] += clipped**2
            odds[active] += effect[active] * (clipped - effect[active] / 2.0) / spread[active] ** 2
            ruined = gain <= -worst[active]
            shown = (won[active] >= needed[active]) & ~ruined
            kept[active[shown]] = True
            hopeless = (lost[active] >= AGAINST) | (odds[active] <= self.rule.futility)
            ends = shown | ruined | hopeless | (count == MOST_PAIRS)
            over = active[ends]
            self.squares[over] += squares[over] - total[over] ** 2 / count
            self.freedom[over] += count - 1
            self.tally.seen += list(total[active[shown]] / count - truth[active[shown]] - self.world.drift)
            active = active[~ends]
        return kept

    def run(self) -> Tally:
        """Go through the night."""
        for _ in range(PROPOSALS):
            real, loss = self.propose()
            effect, spread, runs = self.run_spread, self.pair_spread(), np.zeros(self.num)
            passed = self.screen(loss, effect, spread, runs)
            truth = np.where(real, self.world.effect, 0.0)
            kept = self.decide(passed, truth, effect, runs)
            self.places += passed & ~kept
            shape = int(kept.sum()), GAIN_PAIRS
            base = math.sqrt(1 - self.world.common) * draw_noise(self.draw, self.world.noise, *shape)
            self.tally.fresh += list((base - self.world.draw_own(self.draw, *shape)).mean(1) - self.world.drift)
            self.tally.any_false = np.maximum(self.tally.any_false, kept & ~real)
            self.tally.found += int((kept & real).sum())
            self.tally.real += int(real.sum())
            self.tally.runs_null += list(runs[~real])
            self.tally.runs_real += list(runs[real])
            self.tally.runs += float(runs.sum())
            if self.world.climbs and kept.any():
                self._new_baseline(kept)
        return self.tally


def run_naively(world: World, nights: int, draw: np.random.Generator) -> dict[str, float | None]:
    """Keep whatever looks lower than the best loss so far, one run each."""
    best, any_false, found, real_count = draw.normal(size=nights), np.zeros(nights), 0, 0
    level, shown = np.zeros(nights), best.copy()
    for _ in range(PROPOSALS):
        real = draw.random(nights) < world.share
        mean = level - np.where(real, world.effect, 0.0)
        loss = mean + draw.normal(size=nights)
        kept = loss < best
        best = np.where(kept, loss, best)
        level = np.where(kept, mean, level)
        any_false = any_false + (kept & ~real)
        found, real_count = found + int((kept & real).sum()), real_count + int(real.sum())
    flattered = float(np.mean((shown - best) - (0.0 - level)))
    power = found / real_count if real_count else None
    return {
        "false": float((any_false > 0).mean()), "false_count": float(any_false.mean()), "power": power, "cost": 1.0,
        "seen": flattered,
    }  # fmt: skip


def find_bound(common: float, effect: float = 1.0, miss: float = 0.2, share: float = 0.0) -> dict[str, float]:
    """Return A. Wald's least expected runs (1945) at power 0.8 and a level of 0.05 / 100, if mean, seed noise and
    spread of the baseline were known at no cost: of a null, of a true effect, and of a proposal where a share is
    true."""
    drift = effect**2 / (2.0 * (1.0 - common))
    level = LEVEL / PROPOSALS
    null = ((1 - level) * math.log((1 - level) / miss) + level * math.log(level / (1 - miss))) / drift
    real = ((1 - miss) * math.log((1 - miss) / level) + miss * math.log(miss / (1 - level))) / drift
    return {"null": null, "real": real, "night": (1 - share) * null + share * real}


JUDGE = Rule("judge")
NAIVE = Rule("naive")
COMMON = (0.0, 0.5, 0.8, 0.9)
HALF = World("nulls, 0.5 in common", common=0.5)
TENTH = World("a tenth of 1 sd, 0.5 in common", 0.1, common=0.5)
EXTRA = [
    (HALF, replace(JUDGE, name="judge that never gives up", futility=-math.inf)),
    *[(TENTH, replace(JUDGE, name=f"judge, worst case {worst}", worst=worst)) for worst in (4, 10)],
]


def list_worlds() -> list[World]:
    """Return the nights that are simulated."""
    found = [World(f"nulls, {common:g} in common", common=common) for common in COMMON]
    found += [World(f"a tenth of 1 sd, {common:g} in common", 0.1, common=common) for common in COMMON]
    found += [World(f"half of 1 sd, {common:g} in common", 0.5, common=common) for common in (0.0, 0.8)]
    half = World("", common=0.5)
    return [
        *found,
        replace(half, name="a tenth of 2 sd, 0.5 in common", share=0.1, effect=2.0),
        replace(half, name="a tenth of half a sd, 0.5 in common", share=0.1, effect=0.5),
        replace(half, name="nulls that are alike (0.8)", alike=0.8),
        replace(half, name="climbing, a tenth of 1 sd", share=0.1, climbs=True),
        replace(half, name="proposed after looking at the baseline's luck", share=0.3, hopeful=True),
        replace(half, name="nulls, heavy tails (t of 3)", noise="heavy"),
        replace(half, name="nulls, heavy tails (t of 2)", noise="heaviest"),
        replace(half, name="nulls, skewed (lognormal)", noise="skewed"),
        replace(half, name="nulls three times as noisy", quiet=3.0),
        replace(half, name="nulls of which 1/3 of runs diverge", diverges=1 / 3),
        *[replace(half, name=name, ruin=ruin, drift=drift, quiet=0.7) for name, ruin, drift in RUINS],
    ]


ONE = math.sqrt(0.5)  # unit of the losses below: standard deviation of what is a run's own
RUINS = [  # share of seeds and loss, and the gain in the mean, which is not above zero
    ("better by 0.7 in 95%, worse by 13 in 5%", (0.05, 19 * ONE), 0.0),
    ("better by 0.7 in 90%, worse by 6.4 in 10%", (0.1, 9 * ONE), 0.0),
    ("better by 0.7 in 90%, worse by 9.9 in 10%", (0.1, 14 * ONE), -0.5 * ONE),
    ("better by 0.7 in 80%, worse by 2.8 in 20%", (0.2, 4 * ONE), 0.0),
    ("better by 0.2 in 97%, worse by 6.9 in 3%", (0.03, 9.7 * ONE), 0.0),
]


def list_jobs(nights: int) -> list[tuple[World, Rule, int, list[int]]]:
    """Return the rows: what is simulated, by which rule, how often, and the seed."""
    found: list[tuple[World, Rule, int, list[int]]] = []
    for number, world in enumerate(list_worlds()):
        found.append((world, JUDGE, nights, [number, 1]))
        found += [(world, NAIVE, nights, [number, 2])] if number in {0, 4} else []
    return found + [(world, rule, nights, [99]) for world, rule in EXTRA]


def simulate_row(job: tuple[World, Rule, int, list[int]]) -> dict[str, object]:
    """Return one row of the table."""
    world, rule, nights, seed = job
    draw = np.random.default_rng(seed)
    found = run_naively(world, nights, draw) if rule == NAIVE else Nights(world, rule, nights, draw).run().row()
    row: dict[str, object] = {"world": world.name, "rule": rule.name, **found}
    print(show(row), flush=True)
    return row


def simulate(nights: int, jobs: int) -> dict[str, object]:
    """Return the rows of all tables."""
    with ProcessPoolExecutor(jobs) as pool:
        rows = list(pool.map(simulate_row, list_jobs(nights)))
    bounds = [{"common": common, **find_bound(common, share=0.1)} for common in COMMON]
    return {"date": date.today().isoformat(), "nights": nights, "rows": rows, "bounds": bounds}


def show(row: dict[str, object]) -> str:
    """Return a row in one line."""
    parts = [f"{row['world']:46} {row['rule']:30}"]
    for name in ("false", "power", "cost", *ROWS):
        value = row.get(name)
        parts.append(f"{name} {value:6.3f}" if isinstance(value, float) else f"{name}      -")
    return "  ".join(parts)


def main() -> None:
    """Simulate, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few nights; print, and write nothing")
    parser.add_argument("--nights", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    if given.tiny:
        simulate(8, given.jobs)
        return
    found = simulate(given.nights, given.jobs)
    (RESULTS / "judge.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
