"""Build a judge's answer: an outcome in fixed words, the numbers behind it, and the exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sparsebp_cli.compare.statistics import summarise
from sparsebp_lab.judge.bet import bound_share, forecast, log_capital
from sparsebp_lab.judge.ledger import Book, Ledger, LedgerQuestion
from sparsebp_lab.judge.level import LEVEL, find_free, find_level, find_needed
from sparsebp_lab.judge.move import WORST, Outcome, log_evidence
from sparsebp_lab.judge.question import Proposal
from sparsebp_lab.judge.screen import find_design
from sparsebp_lab.judge.session import TEST_PAIRS, Terms

EXIT_CODES: dict[Outcome, int] = {"better": 0, "equal within the margin": 10, "not shown": 11, "worse": 12}


@dataclass(frozen=True)
class FreshGain:
    """A gain over pairs of fresh seeds that took no part in the decision, so no selection has inflated it.

    Args:
        mean: Mean over the pairs, in the metric's unit; above 0 the candidate is better.
        low: Lower end of its 95% interval (Student's t); None with fewer than three pairs.
        high: Upper end of that interval; None with fewer than three pairs.
        pairs: Number of pairs.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @classmethod
    def of(cls, gains: Sequence[float]) -> FreshGain | None:
        """Summarise gains; None without any."""
        if not gains:
            return None
        found = summarise(gains)
        return cls(found.mean, found.low, found.high, found.n)

    @property
    def outcome(self) -> Outcome:
        """The outcome that its interval shows."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return "not shown"
        return "better" if self.low > 0.0 else "worse"

    def describe(self) -> str:
        """Return the gain in words."""
        interval = "" if self.low is None else f" ({self.low:+.4g} to {self.high:+.4g})"
        return f"{self.mean:+.4g}{interval}, {self.pairs} pairs"


@dataclass(frozen=True)
class JudgeAnswer:
    """The current answer to a question."""

    proposal: Proposal
    question: LedgerQuestion
    book: Book
    ledger: Ledger
    terms: Terms | None  # None: for the test split
    signal_code: int = 0  # the exit code for the signal that stopped it: 130 or 143; 0 without one

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped it."""
        return self.signal_code != 0

    @property
    def outcome(self) -> Outcome:
        """The outcome; an open question is not shown."""
        if self.terms is None:
            return self.test.outcome if self.test is not None and self.test.pairs == TEST_PAIRS else "not shown"
        return self.question.outcome or "not shown"

    @property
    def exit_code(self) -> int:
        """Exit code of the command. That of a signal only if it left the question open."""
        is_open = self.question.outcome is None
        if self.terms is None:
            is_open = self.test is None or self.test.pairs != TEST_PAIRS
        return self.signal_code if self.is_stopped and is_open else EXIT_CODES[self.outcome]

    @property
    def reason(self) -> str:
        """The reason, in one clause."""
        if self.terms is None:
            return f"on the test split, after {len(self.question.looks.get('test', []))} of {TEST_PAIRS} pairs"
        if self.question.outcome is not None:
            return self.question.reason
        return "stopped" if self.is_stopped else f"the budget of {self.terms.budget.describe()} is spent"

    @property
    def test(self) -> FreshGain | None:
        """The gain on the test split; None until it is opened."""
        return FreshGain.of(self.question.gains("test"))

    @property
    def gain(self) -> FreshGain | None:
        """The gain of a kept candidate on fresh pairs; None without such pairs."""
        return FreshGain.of(self.question.gains("gain"))

    @property
    def evidence(self) -> float | None:
        """The evidence of the deciding pairs; None before the first pair."""
        gains, aim, bar = self.question.gains("pairs"), self.question.aim, self.question.bar
        return None if aim is None or bar is None or not gains else math.exp(log_evidence(gains, aim, bar))

    @property
    def claims(self) -> dict[str, dict[str, object]]:
        """What the deciding pairs show about each claim; empty before the first pair."""
        gains, one = self.question.gains("pairs"), self.question
        if self.evidence is None or one.bar is None or one.place is None:
            return {}
        most, needed = math.exp(log_capital([_sign(gain) for gain in gains], 1.0, 0.5, 1.0)), math.exp(one.bar.needed)
        ruins = [look.runs[1] for look in one.ruins]
        return {
            "better in the mean": {"shown": self.evidence >= needed, "evidence": self.evidence, "worst": one.bar.worst},
            "better in most seeds": {"shown": most >= needed, "evidence": most},
            "no rare ruin": {
                "shown": not ruins,
                "most_ruined": None if ruins else bound_share(len(gains), find_level(one.place)),
                "ruined": ruins,
            },
        }

    @property
    def more_seeds(self) -> int | None:
        """Estimated number of further seeds that would keep the candidate, at the current mean and spread; None if the
        question is answered or the number is unknown."""
        aim, bar = self.question.aim, self.question.bar
        if aim is None or self.question.outcome is not None:
            return None
        if bar is not None:
            gains, spread = self.question.gains("pairs"), aim.effect / bar.design
            return forecast(gains, bar.worst, aim.effect, spread, bar.needed)
        spread = aim.effect / find_design(aim.effect, aim.pair_spread)
        gains = self.question.gains("screen")
        worst = self.question.asked.get("worst") or WORST * (aim.run_spread or aim.effect)  # as `Session` stakes
        found = forecast(gains, worst, aim.effect, spread, find_needed(find_free(self.book.taken)))
        return None if found is None else found + len(gains)  # screen runs do not count

    def to_facts(self) -> dict[str, object]:
        """Return plain data in the form of :class:`sparsebp_lab.answer.judge_record.Judgement`."""
        one, aim, bar = self.question, self.question.aim, self.question.bar
        stages = ("pool", "screen", "pairs", "gain", "test")
        return {
            "question": one.digest,
            "outcome": self.outcome,
            "answered": self.terms is None or one.outcome is not None,
            "reason": self.reason,
            "more_seeds": self.more_seeds,
            "exit_code": self.exit_code,
            "metric": self.proposal.metric.name,
            "better": self.proposal.metric.better,
            "equal": self.proposal.equal,
            "candidate": one.asked["candidate"],
            "baseline": one.asked["baseline"],
            "effect": None if aim is None else aim.effect,
            "margin": one.asked["margin"],
            "evidence": self.evidence,
            "needed": None if bar is None else math.exp(bar.needed),
            "claims": self.claims,
            "place": one.place,
            "level": None if one.place is None else find_level(one.place),
            "looks": {stage: [asdict(look) for look in one.looks[stage]] for stage in stages if stage in one.looks},
            "gain": None if self.gain is None else asdict(self.gain),
            "test": None if self.test is None else asdict(self.test),
            "spent": one.spent,
            "seconds_per_run": self.book.find_seconds(one),
            "budget": None if self.terms is None else asdict(self.terms.budget),
            "ledger": {
                "file": str(self.ledger.file),
                "asked": self.book.mark.questions,
                "lines": self.book.mark.lines,
                "digest": self.book.mark.digest,
                "staked": sum(other.place is not None for other in self.book.questions.values()),
                "kept": self.book.num_kept,
                "chance_of_any_false": LEVEL,
            },
        }

    def save(self) -> None:
        """Store the answer beside the ledger, which must never become shorter than it is now."""
        self.ledger.keep_answer(self.question.digest, self.to_facts())

    def lines(self) -> list[str]:
        """Return lines of text for people."""
        one, metric = self.question, self.proposal.metric.name
        names = [str(one.asked[side]["name"]) for side in ("candidate", "baseline")]
        more = "" if self.more_seeds is None else f"; needs about {self.more_seeds} more seeds"
        found = [f"{names[0]} against {names[1]}, {metric}: {self.outcome} ({self.reason}{more})"]
        if self.terms is None:
            if self.test is not None:
                found.append(f"gain on the test split: {self.test.describe()}")
            return found
        counts = [
            f"{len(one.looks[stage])} in {stage}" for stage in ("pool", "screen", "pairs", "gain") if stage in one.looks
        ]
        flops = f"{one.spent['flops']:.4g} FLOPs, " if one.spent["flops"] else ""
        spent = f"{flops}{one.spent['seconds']:.4g} s in {one.spent['runs']:g} runs"
        found.append(f"evaluated: {', '.join(counts) or 'none'}; spent {spent}")
        seconds = self.book.find_seconds(one)
        if self.proposal.equal == "command" and seconds:
            each = " and ".join(f"{mean:.4g} s for the {side}" for side, mean in seconds.items())
            found.append(f"mean time of a run: {each}; with --script, judge does not make costs equal")
        found += self._describe_claims()
        if one.outcome == "better":
            shown = "not measured, because the budget is spent" if self.gain is None else self.gain.describe()
            found.append(f"gain on fresh seeds: {shown}")
        place = f"level {find_level(one.place):.3g} (number {one.place})" if one.place is not None else "no level used"
        found.append(
            f"ledger: question {one.digest}, {place}; {self.book.num_kept} of {len(self.book.questions)} candidates "
            f"were called better; the chance that any of these answers is false is at most {LEVEL:.0%}"
        )
        found.append(f"the ledger has {self.book.mark.lines} lines, and ends with digest {self.book.mark.digest}")
        return found

    def _describe_claims(self) -> list[str]:
        """Return the claims in lines for people."""
        if not self.claims:
            return []
        mean, most, ruin = self.claims.values()
        says = {True: "shown", False: "not shown"}
        if ruins := self.question.ruins:
            rare = f"refuted: {', '.join(look.describe() for look in ruins)}"
        else:
            rare = f"none of {len(self.question.gains('pairs'))} did; at most {ruin['most_ruined']:.1%} of all seeds do"
        return [
            f"better in the mean, if no seed loses more than {mean['worst']:.4g}: {says[bool(mean['shown'])]}",
            f"better in most seeds: {says[bool(most['shown'])]}, evidence {most['evidence']:.4g}",
            f"no seed loses more than {mean['worst']:.4g}: {rare}",
        ]


def _sign(number: float) -> float:
    return float((number > 0.0) - (number < 0.0))
