"""Records of ``judge``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Number


class Side(Answer):
    """One side of a question."""

    name: str
    """Name as first given."""
    digest: str
    """Digest of what it trains."""


class Look(Answer):
    """A run, or a pair of runs, that the judge has evaluated."""

    number: int
    """Number within its stage, from 1."""
    gain: Number | None
    """The candidate's gain, in the metric's unit; null in the pool, and if a run diverged."""
    runs: list[str]
    """Ids, the baseline's run first."""
    values: list[Number | None]
    """Values of the deciding metric, the baseline's run first; null if a run diverged."""


class Gain(Answer):
    """A gain over pairs of fresh seeds that took no part in the decision."""

    mean: float
    """Mean, in the metric's unit; above 0 the candidate is better."""
    low: float | None
    """Lower end of its 95 % interval; null with fewer than three pairs."""
    high: float | None
    """Upper end of this interval."""
    pairs: int
    """Number of pairs."""


class Claim(Answer):
    """What the deciding pairs show about a claim."""

    shown: bool
    """Whether the evidence reaches the required level; for ruin, whether no seed was ruined."""
    evidence: Number | None = None
    """Evidence for it; null for ruin."""
    worst: Number | None = None
    """For the mean: the limit to which the loss of one seed is clipped, in the metric's unit."""
    most_ruined: Number | None = None
    """For ruin: upper bound on the fraction of seeds; null if a seed was ruined."""
    ruined: tuple[str, ...] = ()
    """For ruin: the candidate's runs that lost more than the worst case."""


class Allowed(Answer):
    """The budget of a question."""

    amount: Number
    """Amount, in ``unit``."""
    unit: str
    """``seconds`` or ``flops``."""


class LedgerFacts(Answer):
    """All questions of the store."""

    file: str
    """Path of the ledger."""
    asked: int
    """Questions so far."""
    lines: int
    """Lines so far."""
    digest: str
    """Digest of the last line, which covers all lines before."""
    staked: int
    """Number of questions that used a level."""
    kept: int
    """Number of candidates that were kept."""
    chance_of_any_false: float
    """Upper bound on the probability that any kept candidate is not better."""


class Judgement(Answer):
    """The current answer to a question."""

    question: str
    """Digest of the question: of what both sides train."""
    outcome: str
    """``better``, ``worse``, ``equal within the margin`` or ``not shown``."""
    answered: bool
    """Whether the question is closed; the same command with a larger budget continues an open one."""
    reason: str
    """Reason, in one clause."""
    more_seeds: int | None
    """Estimated number of further seeds that would keep the candidate; null if unknown."""
    exit_code: int
    """0, 10, 11 or 12, depending on the outcome; 130 or 143 if a signal left the question open."""
    metric: str
    """The deciding metric."""
    better: str
    """``lower`` or ``higher``."""
    equal: str
    """What both sides spend equally: ``flops`` or ``steps``; ``command``: one run of the script each, at any cost."""
    candidate: Side
    """The proposal."""
    baseline: Side
    """The side that it is compared with."""
    effect: float | None
    """The smallest gain that the question looks for, in the metric's unit; null before the first pool."""
    margin: float | None
    """Margin within which both count as equal; null: none was given."""
    evidence: Number | None
    """Capital of the betting test on the deciding pairs; it starts at 1. Null before the first pair."""
    needed: Number | None
    """Evidence that is required; null before the question uses a level."""
    claims: dict[str, Claim]
    """``better in the mean``, which decides, ``better in most seeds``, ``no rare ruin``; empty at first."""
    place: int | None
    """Number of the question's level in the ledger, from 1; null: it used none."""
    level: float | None
    """Probability of a false keep that this level allows; null if it used none."""
    looks: dict[str, list[Look]]
    """Evaluated runs by stage: ``pool``, ``screen``, ``pairs``, ``gain``, ``test``."""
    gain: Gain | None
    """Gain of a kept candidate on fresh pairs; null without such pairs."""
    test: Gain | None
    """Gain on the test split; null until it is opened."""
    spent: dict[str, float]
    """Total spent: ``seconds``, ``flops``, ``runs``."""
    seconds_per_run: dict[str, float]
    """Mean seconds of a run of each side over the pairs; empty before the first pair."""
    budget: Allowed | None
    """The budget; null for the test split."""
    ledger: LedgerFacts
    """Totals over all questions of this store, this one included."""
