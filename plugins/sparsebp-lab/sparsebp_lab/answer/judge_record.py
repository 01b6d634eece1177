"""Records of ``judge``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Number


class Side(Answer):
    """One side of a question."""

    name: str
    """As it was first asked."""
    digest: str
    """What it trains, by content."""


class Look(Answer):
    """A pair of runs, or a run, that was looked at."""

    number: int
    """Which of its stage, counted from 1."""
    gain: Number | None
    """What the candidate gained, in the metric's unit; null of the pool, and where a run diverged."""
    runs: list[str]
    """Ids, the baseline's first."""
    values: list[Number | None]
    """The metric that decides, the baseline's first; null where a run diverged."""


class Gain(Answer):
    """A gain over pairs of fresh seeds that decided nothing."""

    mean: float
    """Mean, in the metric's unit; above 0 the candidate is better."""
    low: float | None
    """Low end of its 95 % interval; null under three pairs."""
    high: float | None
    """High end."""
    pairs: int
    """Number of pairs."""


class Claim(Answer):
    """What the pairs that decide show of a claim."""

    shown: bool
    """Whether its evidence reaches what is needed; of ruin, whether no seed was one."""
    evidence: Number | None = None
    """Evidence for it; null of ruin."""
    worst: Number | None = None
    """Of the mean: what the loss of one seed counts at most, in the metric's unit."""
    most_ruined: Number | None = None
    """Of ruin: the share of seeds that it may hit; null where a seed was one."""
    ruined: tuple[str, ...] = ()
    """Of ruin: the candidate's runs that lost more than the worst case."""


class Allowed(Answer):
    """What a question may spend."""

    amount: Number
    """In ``unit``."""
    unit: str
    """``seconds`` or ``flops``."""


class LedgerFacts(Answer):
    """All questions of the store."""

    file: str
    """The ledger."""
    asked: int
    """Questions so far."""
    lines: int
    """Lines so far."""
    digest: str
    """Digest of the last line, which covers all lines before."""
    staked: int
    """Of these, the ones that took a level."""
    kept: int
    """Candidates that were kept."""
    chance_of_any_false: float
    """Bound of the chance that any kept candidate is not better."""


class Judgement(Answer):
    """The answer to a question as it stands."""

    question: str
    """Its digest: questions are known by what they train."""
    outcome: str
    """``better``, ``worse``, ``equal within the margin`` or ``not shown``."""
    answered: bool
    """Whether it is closed; an open question goes on with the same command and a larger budget."""
    reason: str
    """Why, in one clause."""
    more_seeds: int | None
    """About how many seeds more would keep the candidate; null where nobody can tell."""
    exit_code: int
    """0, 10, 11 or 12, as the outcome is."""
    metric: str
    """The metric that decides."""
    better: str
    """``lower`` or ``higher``."""
    equal: str
    """What both sides may spend as much of: ``flops`` or ``steps``; ``command``: what a script of each spends."""
    candidate: Side
    """What was proposed."""
    baseline: Side
    """What it is held against."""
    effect: float | None
    """The least gain that the question looks for, in the metric's unit; null before the first pool."""
    margin: float | None
    """Margin within which both count as equal; null: none was given."""
    evidence: Number | None
    """What bets on the pairs that decide have made of 1; null before the first."""
    needed: Number | None
    """What it must reach; null before the question takes a level."""
    claims: dict[str, Claim]
    """``better in the mean``, which decides, ``better in most seeds``, ``no rare ruin``; empty at first."""
    place: int | None
    """Place of its level in the ledger, counted from 1; null: it took none."""
    level: float | None
    """Chance of a false keep that it was given; null likewise."""
    looks: dict[str, list[Look]]
    """By stage: ``pool``, ``screen``, ``pairs``, ``gain``, ``test``."""
    gain: Gain | None
    """Gain of a kept candidate on fresh pairs; null where none were made."""
    test: Gain | None
    """Gain on the test split; null while it is sealed."""
    spent: dict[str, float]
    """What it took in all: ``seconds``, ``flops``, ``runs``."""
    seconds_per_run: dict[str, float]
    """Mean seconds of a run of each side over the pairs; empty before the first."""
    budget: Allowed | None
    """What it may spend; null of the test split."""
    ledger: LedgerFacts
    """What was asked of this store, this question among it."""
