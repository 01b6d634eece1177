"""A scripted hill-climber on the bundled llama, half of whose proposals change nothing, under two rules.

    python benchmarks/judge_climb.py --home FOLDER     # an hour or two on one core; goes on where it was stopped
    python benchmarks/judge_climb.py --tiny            # two proposals in a temporary folder; writes nothing

The naive rule trains each proposal once, with one seed, and keeps what looks lower. The judge is that of `sparsebp
judge`, with its ledger, looks and answers; only its runs are trained in this process, one after the other, since to
import PyTorch for each would take longer than the runs do. Then both winners are trained with fresh seeds beside the
recipe that both began with. Writes benchmarks/results/judge-climb.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT, use_checkout

use_checkout()

from sparsebp_cli.compare.statistics import summarise  # noqa: E402
from sparsebp_cli.judge.arms import Arms  # noqa: E402
from sparsebp_cli.judge.budget import QuestionBudget  # noqa: E402
from sparsebp_cli.judge.ledger import Ledger  # noqa: E402
from sparsebp_cli.judge.question import Contender, Proposal  # noqa: E402
from sparsebp_cli.judge.session import JudgeSession, Terms  # noqa: E402
from sparsebp_cli.plan import Plan, Provenance  # noqa: E402
from sparsebp_cli.recipe import load_recipe  # noqa: E402
from sparsebp_cli.run import RunFolder, State  # noqa: E402
from sparsebp_cli.study.driver import Status, TrialRun  # noqa: E402
from sparsebp_cli.study.store import TrialStore  # noqa: E402
from sparsebp_cli.study.trial import StudyTrial  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "judge-climb.json"
START = (
    "training.max_steps=10",
    "training.per_device_train_batch_size=4",
    "training.warmup_steps=2",
    "dataset.max_seq_length=64",
    "measure={eval_every: 100, eval_examples: 32, probe_every: null, fidelity_every: null}",
    "checkpoint.every=100",
    "name=start",
)
# In a fixed order that was drawn once. A null changes a number that 10 steps cannot feel; the others may help or not.
PROPOSALS: tuple[tuple[str, bool], ...] = (
    ("training.weight_decay=0.0101", True),
    ("training.learning_rate=2e-3", False),
    ("training.optim_args.eps=1.1e-8", True),
    ("training.learning_rate=3e-3", False),
    ("training.weight_decay=0.0099", True),
    ("training.lr_scheduler_type=linear", False),
    ("training.optim_args.betas=[0.9, 0.9991]", True),
    ("training.max_grad_norm=0.5", False),
    ("training.weight_decay=0.0102", True),
    ("training.warmup_steps=0", False),
)
NAIVE_SEED = 0
FINAL_SEEDS = range(900, 905)  # of neither rule
BUDGET = 1e18
GAIN_PAIRS = 2  # fewer than the verb's default: there is little time


class HereDriver:
    """Trains trials in this process; otherwise as :class:`sparsebp_cli.study.driver.Driver`."""

    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self.runs: dict[str, TrialRun] = {}

    def drive(self, trials: Sequence[StudyTrial], pause: Callable[[], None]) -> None:  # noqa: ARG002 - of the contract
        for trial in trials:
            run = self._store.find(trial)
            train_here(trial, run)
            self.runs[trial.run_id] = TrialRun(trial, run, TrialRun(trial, run).look())


def train_here(trial: StudyTrial, run: RunFolder) -> None:
    """Train a trial unless its run has finished."""
    from sparsebp_cli.worker.__main__ import main as work

    if run.plan_file.exists() and run.state() is State.FINISHED:
        return
    run.path.mkdir(parents=True, exist_ok=True)
    Plan(run_id=run.run_id, recipe=trial.recipe, provenance=Provenance()).save(run.path)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.redirect_stdout(sys.stderr):
        code = work(run.plan_file)
    for number, handler in before:
        signal.signal(number, handler)
    if code not in {0, 3}:
        raise SystemExit(f"run {run.run_id} ended with {code}")


def make_contender(changes: Sequence[str], name: str) -> Contender:
    """Return the starting recipe with some changes."""
    file = ROOT / "recipes" / "start" / "python-docs.yaml"
    found = Contender.of(load_recipe(file, [*START, *changes]), file)
    return Contender(name, found.recipe)


def find_loss(arms: Arms, side: str, seed: int) -> float:
    """Train one run of a side and return its validation loss."""
    trial = arms.make_trial(side, seed)
    arms.driver.drive([trial], lambda: None)
    value = arms.read(trial)
    if value is None or arms.driver.runs[trial.run_id].status is Status.DIVERGED:
        return float("inf")
    return value


def make_arms(candidate: Contender, baseline: Contender) -> Arms:
    """Return the arms of a question, trained here."""
    arms = Arms(Proposal(candidate, baseline, "steps"), Provenance())
    arms.driver = HereDriver(arms.store)  # type: ignore[assignment]
    return arms


@dataclass
class Climb:
    """What a rule has kept so far."""

    changes: list[str]
    shown: float = 0.0  # the gain that the rule itself would report
    num_runs: int = 0


def climb_naively(climb: Climb, change: str, best: float) -> tuple[dict[str, object], float]:
    """Train a proposal once and keep it if it looks lower than the best loss so far."""
    candidate, baseline = make_contender([*climb.changes, change], change), make_contender(climb.changes, "best")
    loss = find_loss(make_arms(candidate, baseline), "candidate", NAIVE_SEED)
    climb.num_runs += 1
    gain = best - loss
    if gain > 0.0:
        climb.changes.append(change)
        climb.shown += gain
    return {"gain": gain, "kept": gain > 0.0}, min(best, loss)


def climb_judged(climb: Climb, change: str) -> dict[str, object]:
    """Ask the judge, and keep what it calls better."""
    candidate, baseline = make_contender([*climb.changes, change], change), make_contender(climb.changes, "best")
    ledger = Ledger()
    session = JudgeSession(
        make_arms(candidate, baseline),
        Terms(QuestionBudget(BUDGET, "flops"), gain_pairs=GAIN_PAIRS),
        ledger,
        lambda: None,
    )
    question = session.run()
    runs = question.spent["runs"]
    climb.num_runs += int(runs)
    if question.outcome == "better":
        climb.changes.append(change)
        climb.shown += statistics.fmean(question.gains("gain"))
    looks = {stage: question.gains(stage) for stage in ("screen", "pairs", "gain") if stage in question.looks}
    found = {"outcome": question.outcome, "reason": question.reason, "runs": runs, "kept": question.outcome == "better"}
    return found | {"looks": looks, "place": question.place, "aim": question.aim and vars(question.aim)}


def climb(proposals: Sequence[tuple[str, bool]], seeds: Sequence[int]) -> dict[str, object]:
    """Climb by both rules, and measure both winners with fresh seeds."""
    naive, judged = Climb([]), Climb([])
    start = make_contender([], "start")
    best = find_loss(make_arms(make_contender([proposals[0][0]], "first"), start), "baseline", NAIVE_SEED)
    naive.num_runs += 1
    log: list[dict[str, object]] = []
    for change, is_null in proposals:
        by_naive, best = climb_naively(naive, change, best)
        by_judge = climb_judged(judged, change)
        log.append({"proposal": change, "null": is_null, "naive": by_naive, "judge": by_judge})
        print(f"{change}: naive {by_naive}; judge {by_judge['outcome']}, {by_judge['runs']:g} runs", flush=True)
    winners = {}
    for name, one in (("naive", naive), ("judge", judged)):
        gains: list[float] = []
        if one.changes:
            arms = make_arms(make_contender(one.changes, name), start)
            gains = [find_loss(arms, "baseline", seed) - find_loss(arms, "candidate", seed) for seed in seeds]
        found = summarise(gains) if gains else None
        true = None if found is None else {"mean": found.mean, "low": found.low, "high": found.high, "pairs": found.n}
        winners[name] = {"changes": one.changes, "shown": one.shown, "true": true, "runs": one.num_runs}
    return {"start": START, "proposals": log, "winners": winners, "seeds": list(seeds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, help="folder of the runs, which are kept there")
    parser.add_argument("--tiny", action="store_true", help="two proposals; write nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARSEBP_HOME"] = str(given.home or Path(folder))
        found = climb(PROPOSALS[:2] if given.tiny else PROPOSALS, FINAL_SEEDS[:3] if given.tiny else FINAL_SEEDS)
    if given.tiny:
        print(json.dumps(found["winners"]))
    else:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
