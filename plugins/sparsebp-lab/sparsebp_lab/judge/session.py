"""Answer one question with one judge: read the next move from the ledger, train it, and record the result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsebp_cli.errors import RunFailedError, UsageError
from sparsebp_lab.judge.arms import Arms, SideTrial
from sparsebp_lab.judge.budget import QuestionBudget
from sparsebp_lab.judge.ledger import SIDES, Book, Ledger, LedgerLook, LedgerQuestion
from sparsebp_lab.judge.move import (
    WORST,
    Decide,
    FixAim,
    Move,
    Outcome,
    Stage,
    Stake,
    Train,
    find_pair_move,
    find_screen_move,
)
from sparsebp_lab.judge.screen import FIRST_RUNS, find_design

DEFAULT_GAIN_PAIRS = 4
TEST_PAIRS = 6


@dataclass(frozen=True)
class Terms:
    """Options that the user gave beside the two sides."""

    budget: QuestionBudget
    effect: float | None = None  # in the metric's unit; None: one standard deviation of a run of the baseline
    margin: float | None = None  # within it both count as equal; None: not asked
    gain_pairs: int = DEFAULT_GAIN_PAIRS  # fresh pairs that measure a kept candidate's gain
    worst: float | None = None  # a larger loss of a seed is a ruin; None: 20 standard deviations of a run


class JudgeSession:
    """One command on one question."""

    def __init__(self, arms: Arms[Any], terms: Terms, ledger: Ledger, pause: Callable[[], None]) -> None:
        """Open a question; ``pause`` waits a moment, and sets :attr:`is_stopped` after a signal."""
        self.arms, self.terms, self.ledger, self._pause = arms, terms, ledger, pause
        self.proposal = arms.proposal
        self.is_stopped = False  # a signal came: start no further runs
        self.is_out_of_budget = False
        self._trained: dict[str, SideTrial] = {}  # by id; runs that this judge has not charged yet
        self._charged: set[str] = set()

    @property
    def book(self) -> Book:
        """The current ledger."""
        return self.ledger.read()

    def ask(self) -> LedgerQuestion:
        """Write the question into the ledger, and return its entries. Raise UsageError if it was asked before with
        another effect, margin or worst case."""
        sides = dict(zip(SIDES, (self.proposal.baseline, self.proposal.candidate), strict=True))
        entry: dict[str, object] = {side: {"name": one.name, "digest": one.digest} for side, one in sides.items()}
        entry |= {"kind": "asked", "question": self.proposal.digest, "metric": self.proposal.metric.name}
        terms = {"effect": self.terms.effect, "margin": self.terms.margin, "worst": self.terms.worst}
        found = self.ledger.write(entry | terms).questions[self.proposal.digest]
        for key, value in terms.items():
            if (was := found.asked.get(key)) != value:  # version 0.5 stored no worst case
                was = "none" if was is None else was
                raise UsageError(f"this comparison began with --{key} {was}: give this value again")
        return found

    def run(self) -> LedgerQuestion:
        """Continue until the question is answered, the budget is spent, or a signal comes; return the question."""
        question = self.ask()
        while not (self.is_stopped or self.is_out_of_budget):
            move = find_move(question, self.terms.gain_pairs)
            if move is None:
                break
            match move:
                case Train(stage, number):
                    self._train(question, stage, number)
                case FixAim():
                    self._fix_aim()
                case Stake():
                    self._stake(question)
                case Decide(outcome, reason):
                    self._write("answered", outcome=outcome, reason=reason)
            question = self.book.questions[self.proposal.digest]
        return question

    def open_test(self) -> LedgerQuestion:
        """Train fresh pairs that read the test split, once for this data; return the question with their looks. Raise
        UsageError if the candidate was not kept, there is no test split, or another question has opened it."""
        book = self.book
        question = book.questions.get(self.proposal.digest)
        if question is None or question.outcome != "better":
            raise UsageError(
                "--final needs a candidate that judge found better on validation: run judge without --final first"
            )
        data = self.proposal.data
        if data is None:
            raise UsageError(
                "--final needs a test split: set dataset.test_fraction or dataset.test_split in both recipes"
            )
        self._write("opened", data=data, pairs=TEST_PAIRS)  # before any run reads it, so that a kill cannot hide it
        first = self.book.opened[data]
        if first["question"] != self.proposal.digest:
            raise UsageError(
                f"an earlier question ({first['question']}) has used these data's test split, and only one "
                "question may: use other data, or leave out --final"
            )
        for number in range(len(question.looks.get("test", [])) + 1, TEST_PAIRS + 1):
            if self.is_stopped:
                break
            self._train(question, "test", number)
        return self.book.questions[self.proposal.digest]

    def _train(self, question: LedgerQuestion, stage: Stage, number: int) -> None:
        """Train the runs of a look, with the sides in alternating order, and record the look."""
        num_runs = 1 if stage == "pool" else 2
        if stage != "test" and not self.terms.budget.allows(question.spent, question.dearest, num_runs):
            self.is_out_of_budget = True
            return
        while missing := [trial for trial in self.arms.find_rehearsals() if not self.arms.is_done(trial)]:
            if not self._drive(missing):
                return
        for trial in self.arms.find_rehearsals():
            self._note_trained(trial)
        # The pool serves as the beginning of every candidate's screen.
        key = self.proposal.seed_key("screen" if stage == "pool" else stage, number)
        seed, is_test = self.book.find_seed(*key), stage == "test"
        trials = [self.arms.make_trial(side, seed, test=is_test) for side in SIDES[:num_runs]]
        if not self._drive(trials if number % 2 else trials[::-1]):
            return
        metric = self.proposal.metric.name.replace("eval/", "test/", 1) if is_test else ""
        values = [self._read(trial, metric) for trial in trials]
        whole = len(values) == 2 and None not in values
        gain = self.proposal.sign * (values[1] - values[0]) if whole else None  # type: ignore[operator]
        runs = [self.arms.find_run(trial) for trial in trials]
        self._write("look", stage=stage, number=number, gain=gain, runs=runs, values=values)

    def _drive(self, trials: Sequence[SideTrial]) -> bool:
        """Train trials to their end; return whether all have a result. Raise RunFailedError for a trial without one."""
        self.arms.mark = self.book.mark  # each run stores it, so that a truncated ledger is noticed
        self.arms.train(trials, self._pause)
        if self.is_stopped:
            return False
        if lines := self.arms.find_unfinished(trials):
            raise RunFailedError(f"{'; '.join(lines)}; run the same command again to continue")
        for trial in trials:
            self._note_trained(trial)
        return True

    def _note_trained(self, trial: SideTrial) -> None:
        if trial.run_id not in self._charged:
            self._trained[trial.run_id] = trial

    def _read(self, trial: SideTrial, metric: str) -> float | None:
        """Return a trial's value; None if it diverged. Raise RunFailedError if it has none."""
        if self.arms.has_diverged(trial):
            return None
        value = self.arms.read(trial, metric)
        if value is None:
            raise RunFailedError(
                f"run {self.arms.find_run(trial)} has no value of {metric or self.proposal.metric.name} after "
                "its last step"
            )
        return value

    def _fix_aim(self) -> None:
        """Fix the effect and the spread of pairs, from what is known before this question's first look."""
        book, baseline = self.book, self.proposal.baseline.digest
        run_spread = statistics.stdev(book.find_values(baseline))
        effect = run_spread if self.terms.effect is None else self.terms.effect
        if not effect:
            raise UsageError(
                "all runs of the baseline have the same value, so judge cannot choose the smallest gain to look "
                "for: give --effect"
            )
        spread = book.find_squares(baseline).find_spread(run_spread) or effect
        values = {"effect": effect, "run_spread": run_spread, "pair_spread": spread, "margin": self.terms.margin}
        self._write("aimed", **values)

    def _stake(self, question: LedgerQuestion) -> None:
        """Take a level, and fix the test of the deciding pairs."""
        assert question.aim is not None
        book, baseline = self.book, self.proposal.baseline.digest
        run_spread = statistics.stdev(book.find_values(baseline))
        spread = book.find_squares(baseline).find_spread(run_spread)
        default = WORST * (run_spread or question.aim.effect)
        worst = default if self.terms.worst is None else self.terms.worst
        self._write("staked", design=find_design(question.aim.effect, spread), worst=worst)

    def _write(self, kind: str, **values: object) -> None:
        """Append an entry of this question, which pays for runs that no entry has charged yet."""
        charged = {self.arms.find_run(trial): self.arms.find_cost(trial) for trial in self._trained.values()}
        more: dict[str, object] = {"charged": charged} if charged else {}
        self.ledger.write({"kind": kind, "question": self.proposal.digest} | values | more)
        self._charged |= self._trained.keys()
        self._trained = {}


def find_move(question: LedgerQuestion, gain_pairs: int) -> Move | None:
    """Return the next move of a question; None when it is answered and its gain is measured."""
    looks = [look for some in question.looks.values() for look in some if look.values]
    if question.outcome == "better":
        made = len(question.looks.get("gain", []))
        is_whole = not any(look.diverged for look in question.looks.get("gain", []))
        return Train("gain", made + 1) if made < gain_pairs and is_whole else None
    if question.outcome is not None:
        return None
    if (move := _find_broken(question, looks)) is not None:
        return move
    pool = len(question.looks.get("pool", []))
    if question.aim is None:
        return Train("pool", pool + 1) if pool < FIRST_RUNS else FixAim()
    if question.bar is None:
        return find_screen_move(question.gains("screen"), question.aim)
    return find_pair_move(question.gains("pairs"), question.aim, question.bar)


def _find_broken(question: LedgerQuestion, looks: Sequence[LedgerLook]) -> Decide | None:
    """Return the answer that a single run forces: it diverged, or it is a ruin."""
    sides = {look.diverged for look in looks}
    answers: dict[str, Outcome] = {"baseline": "not shown", "candidate": "worse"}
    if found := next((side for side in SIDES if side in sides), ""):
        return Decide(answers[found], f"a run of the {found} diverged")
    if question.bar is None or not question.ruins:
        return None
    return Decide("not shown", f"{question.ruins[0].describe()}, at least --worst {question.bar.worst:.4g}")
