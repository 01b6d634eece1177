"""A scripted hill-climber on the bundled llama, half of whose proposals change nothing, under two rules.

    python benchmarks/judge_climb.py --home FOLDER     # a quarter of an hour of one core; goes on where it was stopped
    python benchmarks/judge_climb.py --tiny            # two proposals in a temporary folder; writes nothing

The naive rule trains each proposal once, with one seed, and keeps what looks lower. The judge is that of `sparsebp
judge`, with its ledger, looks and answers; only its runs are trained by a loop of this file, in one process, since to
start a worker takes longer than such a short run. Then both winners are trained with fresh seeds beside the recipe that
both began with. Writes benchmarks/results/judge-climb.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from checkout import ROOT, use_checkout

use_checkout()

from sparsebp_cli.compare.statistics import summarise  # noqa: E402
from sparsebp_cli.plan import Plan, Provenance  # noqa: E402
from sparsebp_cli.recipe import Recipe, load_recipe  # noqa: E402
from sparsebp_cli.run import JournalWriter, State  # noqa: E402
from sparsebp_cli.source.bundled import austen_llama, load_python_docs  # noqa: E402
from sparsebp_lab.judge.budget import QuestionBudget  # noqa: E402
from sparsebp_lab.judge.ledger import Ledger  # noqa: E402
from sparsebp_lab.judge.question import Contender, RecipeProposal  # noqa: E402
from sparsebp_lab.judge.recipe_arms import RecipeArms  # noqa: E402
from sparsebp_lab.judge.session import JudgeSession, Terms  # noqa: E402
from sparsebp_lab.study.driver import Status, TrialRun  # noqa: E402
from sparsebp_lab.study.store import TrialStore  # noqa: E402
from sparsebp_lab.study.trial import StudyTrial  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "judge-climb.json"
BATCH, LENGTH, HELD_OUT = 4, 32, 32  # texts a step, tokens of a text, texts that are held out
START = (
    "training.max_steps=10",
    f"training.per_device_train_batch_size={BATCH}",
    "training.warmup_steps=2",
    f"dataset.max_seq_length={LENGTH}",
    f"measure={{eval_every: 100, eval_examples: {HELD_OUT}, probe_every: null, fidelity_every: null}}",
    "name=start",
)
# Nulls change what nothing else here sets, so they stay nulls whatever was kept before them. Ten steps cannot feel
# these numbers: a run changes in its sixth digit.
FELT_BY_NOBODY = tuple(f"training.optim_args.eps=1.{digit}e-8" for digit in range(1, 8))
# These split the same batch into other parts, too, and the order of the data is drawn anew: a run has another luck.
OTHER_LUCK = tuple(
    f"training.per_device_train_batch_size={2 - number % 2} training.gradient_accumulation_steps={2 + number % 2 * 2}"
    f" training.optim_args.eps=0.9{number}e-8"
    for number in range(1, 9)
)
REAL = (  # they may help or not: nobody knew before
    "training.learning_rate=2e-3",
    "training.lr_scheduler_type=linear",
    "training.max_grad_norm=0.5",
    "training.warmup_steps=0",
    "training.learning_rate=3e-3",
    "training.optim_args.betas=[0.9,0.95]",
    "training.learning_rate=5e-4",
    "training.max_grad_norm=null",
    "training.weight_decay=0.1",
    "training.lr_scheduler_type=constant_with_warmup",
    "training.learning_rate=5e-3",
    "training.warmup_steps=4",
    "training.optim_args.betas=[0.8,0.99]",
    "training.lr_scheduler_type=cosine",
    "training.learning_rate=1e-2",
)
NULLS = (*FELT_BY_NOBODY, *OTHER_LUCK)
PROPOSALS = random.Random(7).sample((*NULLS, *REAL), 30)  # in an order that was drawn once, before any was trained
TINY = ("training.learning_rate=3e-3", NULLS[0])
NAIVE_SEED = 0
FINAL_SEEDS = range(900, 912)  # of neither rule
BUDGET = 1e18
GAIN_PAIRS = 4


class Trainer:
    """Trains the bundled llama on the Python documentation, as a recipe says, from the same weights each time."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(austen_llama())
        self.model = AutoModelForCausalLM.from_pretrained(austen_llama())
        self.weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.train_NT, self.held_out_NT = (
            self._cut(tokenizer, "\n\n".join(row["text"] for row in load_python_docs()[split]))
            for split in ("train", "test")
        )

    @staticmethod
    def _cut(tokenizer: Any, text: str) -> Any:
        import torch

        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH).to(torch.long)

    def train(self, recipe: Recipe) -> float:
        """Train with a recipe's rate, schedule, AdamW and seed; return the loss on held-out text."""
        import torch
        from transformers import get_scheduler

        training = recipe.training
        self.model.load_state_dict(self.weights)
        parts = training.per_device_train_batch_size
        draw = torch.Generator().manual_seed(training.seed * 8 + parts)  # as a loader draws anew for other parts
        order = torch.randperm(len(self.train_NT), generator=draw)
        decay = {} if training.weight_decay is None else {"weight_decay": training.weight_decay}
        options: Any = {**training.optim_args, **decay}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.learning_rate, **options)
        schedule = get_scheduler(training.lr_scheduler_type, optimizer, training.num_warmup_steps, training.max_steps)
        for step in range(training.max_steps):
            # At once: all texts have as many targets, so the gradient is that of the parts, accumulated.
            batch = self.train_NT[order[step * BATCH : (step + 1) * BATCH]]
            self.model(input_ids=batch, labels=batch).loss.backward()
            if training.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        with torch.no_grad():
            held_out = self.held_out_NT[:HELD_OUT]
            return float(self.model(input_ids=held_out, labels=held_out).loss)


class HereDriver:
    """Trains trials by :class:`Trainer`; otherwise as :class:`sparsebp_lab.study.driver.Driver`."""

    trainer: ClassVar[Trainer | None] = None

    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self.runs: dict[str, TrialRun] = {}

    def drive(self, trials: Sequence[StudyTrial], pause: Callable[[], None]) -> None:  # noqa: ARG002 - of the contract
        """Train trials, one after the other, each once."""
        for trial in trials:
            run = self._store.find(trial)
            if not (run.plan_file.exists() and run.state() is State.FINISHED):
                run.path.mkdir(parents=True, exist_ok=True)
                Plan(run_id=run.run_id, recipe=trial.recipe, provenance=Provenance()).save(run.path)
                HereDriver.trainer = HereDriver.trainer or Trainer()
                with run.lock("worker"), JournalWriter(run.path) as journal:
                    journal.write("attempt", from_step=0, environment={"python": "3", "packages": {}})
                    loss, steps = HereDriver.trainer.train(trial.recipe), trial.recipe.training.max_steps
                    journal.write("metrics", step=steps, values={"train/loss": loss, "eval/loss": loss})
                    journal.write("end", status="finished", step=steps, text="")
            self.runs[trial.run_id] = TrialRun(trial, run, TrialRun(trial, run).look())


def make_contender(proposals: Sequence[str], name: str) -> Contender:
    """Return the starting recipe with the changes of some proposals; of two that set one key, the later counts."""
    changes = [change for proposal in proposals for change in proposal.split(" ")]
    file = ROOT / "recipes" / "start" / "python-docs.yaml"
    found = Contender.of(load_recipe(file, [*START, *changes]), file)
    return Contender(name, found.recipe)


def find_loss(arms: RecipeArms, side: str, seed: int) -> float:
    """Train one run of a side and return its validation loss."""
    trial = arms.make_trial(side, seed)
    arms.driver.drive([trial], lambda: None)
    value = arms.read(trial)
    if value is None or arms.driver.runs[trial.run_id].status is Status.DIVERGED:
        return float("inf")
    return value


def make_arms(candidate: Contender, baseline: Contender) -> RecipeArms:
    """Return the arms of a question, trained here."""
    arms = RecipeArms(RecipeProposal(candidate, baseline, "steps"), Provenance())
    arms.driver = HereDriver(arms.store)  # type: ignore[assignment]
    return arms


@dataclass
class Climb:
    """What a rule has kept so far."""

    kept: list[str]
    shown: float = 0.0  # the gain that the rule itself would report
    num_runs: int = 0

    def make_sides(self, change: str) -> tuple[Contender, Contender]:
        """Return a proposal, and what it is laid upon."""
        return make_contender([*self.kept, change], change), make_contender(self.kept, "best")

    def keep(self, change: str, gain: float) -> None:
        """Lay the next proposals upon this one."""
        self.kept.append(change)
        self.shown += gain


def climb_naively(climb: Climb, change: str, best: float) -> tuple[dict[str, object], float]:
    """Train a proposal once and keep it if it looks lower than the best loss so far."""
    loss = find_loss(make_arms(*climb.make_sides(change)), "candidate", NAIVE_SEED)
    climb.num_runs += 1
    gain = best - loss
    if gain > 0.0:
        climb.keep(change, gain)
    return {"gain": gain, "kept": gain > 0.0}, min(best, loss)


def climb_judged(climb: Climb, change: str) -> dict[str, object]:
    """Ask the judge, and keep what it calls better."""
    terms = Terms(QuestionBudget(BUDGET, "flops"), gain_pairs=GAIN_PAIRS)
    question = JudgeSession(make_arms(*climb.make_sides(change)), terms, Ledger(), lambda: None).run()
    runs = int(question.spent["runs"])
    climb.num_runs += runs
    if question.outcome == "better":
        climb.keep(change, statistics.fmean(question.gains("gain")))
    looks = {stage: question.gains(stage) for stage in ("screen", "pairs", "gain") if stage in question.looks}
    found = {"outcome": question.outcome, "reason": question.reason, "runs": runs, "kept": question.outcome == "better"}
    return found | {"looks": looks, "place": question.place, "aim": question.aim and vars(question.aim)}


def climb(proposals: Sequence[str], seeds: Sequence[int]) -> dict[str, object]:
    """Climb by both rules, and measure both winners with fresh seeds."""
    naive, judged = Climb([]), Climb([])
    best = find_loss(make_arms(*naive.make_sides(proposals[0])), "baseline", NAIVE_SEED)
    naive.num_runs += 1
    log: list[dict[str, object]] = []
    for change in proposals:
        by_naive, best = climb_naively(naive, change, best)
        by_judge = climb_judged(judged, change)
        log.append({"proposal": change, "null": change in NULLS, "naive": by_naive, "judge": by_judge})
        print(f"{change}: naive {by_naive}; judge {by_judge['outcome']}, {by_judge['runs']} runs", flush=True)
    winners = {name: measure_winner(one, seeds) for name, one in (("naive", naive), ("judge", judged))}
    return {"start": START, "proposals": log, "winners": winners, "seeds": list(seeds)}


def measure_winner(climb: Climb, seeds: Sequence[int]) -> dict[str, object]:
    """Train what a rule ended with beside what it began with, on seeds that decided nothing."""
    gains: list[float] = []
    if climb.kept:
        arms = make_arms(make_contender(climb.kept, "winner"), make_contender([], "start"))
        gains = [find_loss(arms, "baseline", seed) - find_loss(arms, "candidate", seed) for seed in seeds]
    found = summarise(gains) if gains else None
    true = None if found is None else {"mean": found.mean, "low": found.low, "high": found.high, "gains": gains}
    return {"kept": climb.kept, "shown": climb.shown, "true": true, "runs": climb.num_runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, help="folder of the runs, which are kept there")
    parser.add_argument("--tiny", action="store_true", help="two proposals; write nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARSEBP_HOME"] = str(given.home or Path(folder))
        found = climb(TINY if given.tiny else PROPOSALS, FINAL_SEEDS[:3] if given.tiny else FINAL_SEEDS)
    if given.tiny:
        print(json.dumps(found["winners"]))
    else:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
