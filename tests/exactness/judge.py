"""What ``lossless`` makes of a case in a loop of one's own: right, plain, refused by name, or wrong.

The oracle is a copy of the model that the engine never sees: the same script on it, by autograd. Where the plain step
lets texts in a row read each other and the packed one does not, each text alone is the oracle.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import sparsebp_cli as sbp
from sparsebp_cli.errors import SparseBPError
from tests.exactness.axis import Case
from tests.exactness.batch import Batch, make_batches
from tests.exactness.loss import LOSSES, Script
from tests.exactness.step import Alone, AloneWhereRestarting, AloneWithoutCache, Step, restarts
from tests.exactness.subject import make_model

Verdict = Literal["right", "plain", "refused", "wrong", "unjudged"]
OVER = "the training is over"  # after an error
NUM_UPDATES = 3  # of a run
MICRO = {"one": 1, "two": 2, "three": 3, "update": 3}
WRONG = 1e-3  # error of a row of a gradient in float32 that no rounding explains: what was right is under 1e-4
NEARBY = 16  # weights beside the model's
MOST_TIMES, ROUNDING = 4.0, 0.05  # in 16 bits: how many times the plain step's own rounding, and beside it
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "never": {"verify": "never"},
    "always": {"verify": "always"},
    "tiles": {"logits": "tiles", "verify": "never"},
    "whole": {"logits": "whole"},
    "labels: false": {"labels": False},
    "separate": {"prefixes": "separate"},
}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("tokens", {"score": "loss", "keep": 0.5, "mode": "exact"}),
    "frozen": ("frozen", {"freeze": ["*.0.*"]}),
}


@dataclass
class Outcome:
    """What became of one update."""

    verdict: Verdict
    text: str = ""  # reason of a refusal or of a plain step; error of what is wrong
    alone: bool = False  # right beside each text alone, which the plain step is not


@dataclass
class Subject:
    """A case with its model, and the batches of its updates."""

    case: Case
    seed: int
    updates: list[list[Batch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.updates:
            micro = MICRO[self.case["accumulation"]]
            batches = make_batches(self.case, self.seed, NUM_UPDATES * micro)
            self.updates = [batches[start : start + micro] for start in range(0, len(batches), micro)]


def policy_of(case: Case) -> sbp.Policy:
    """Return the policy of a case."""
    options = OPTIONS[case["policy"]] | ({"prefixes": "update"} if case["accumulation"] == "update" else {})
    return sbp.make_policy("lossless", **options)


def policies_beside(case: Case) -> list[sbp.Policy]:
    """Return the policies that the oracle has, too."""
    found = BESIDE.get(case["beside"])
    return [] if found is None else [sbp.make_policy(found[0], **found[1])]


def judge(subject: Subject) -> list[Outcome]:
    """Judge each update of a run."""
    try:
        make_model(subject.case)
    except Exception as error:  # peft has no such adapter for experts, or the architecture no such option
        return [Outcome("unjudged", f"not made: {error}"[:120])] * NUM_UPDATES
    if subject.case["entry"] != "attach":
        from tests.exactness.trainer import judge_trainer

        return judge_trainer(subject)
    if subject.case["wrapper"] == "two ranks":
        from tests.exactness.rank import judge_ranks

        return judge_ranks(subject)
    return judge_loop(subject)


def judge_loop(subject: Subject) -> list[Outcome]:
    """Judge a loop of one's own, one process."""
    case = subject.case
    beside = policies_beside(case)
    plain = make_model(case)
    model = deepcopy(plain)
    try:
        oracle = Loop(plain, case, beside)
    except SparseBPError as error:  # the policy beside it refuses this model
        return [Outcome("unjudged", str(error)) for _ in subject.updates]
    try:
        own = Loop(model, case, [*beside, policy_of(case)])
    except SparseBPError as error:
        return [Outcome("refused", str(error)) for _ in subject.updates]
    found: list[Outcome] = []
    for number in range(len(subject.updates)):
        found.append(_judge_update(oracle, own, subject, number))
        if found[-1].verdict == "refused":  # an error, with which a training ends
            return found + [Outcome("unjudged", OVER)] * (len(subject.updates) - len(found))
    return found


def _judge_update(  # noqa: PLR0911 - what may become of an update
    oracle: Loop, own: Loop, subject: Subject, number: int
) -> Outcome:
    batches, seed = subject.updates[number], subject.seed + number
    try:
        expected = oracle.run(batches, seed)
    except Exception as error:  # whatever a model or a loss thinks of such a batch
        return Outcome("unjudged", f"{type(error).__name__}: {error}"[:120])
    if not expected.is_finite or expected.is_empty:
        return Outcome("unjudged", "the plain gradient is empty or not finite")
    counts = own.counts
    packed, refused = counts.packed, counts.refused.copy()
    try:
        got = own.run(batches, seed)
    except SparseBPError as error:
        own.forget()
        return Outcome("refused", str(error))
    except Exception as error:
        own.forget()
        return Outcome("wrong", f"{type(error).__name__}: {error}"[:300])
    is_packed = counts.packed > packed
    text, alone = _error(oracle, subject, expected, got, number)
    if text and _has_no_oracle(oracle, subject, number):
        return Outcome("unjudged", "the plain forward of this family lets texts in a row read each other")
    if text and _is_right_in_float64(subject, number):
        return Outcome("right" if is_packed else "plain", "rounding on the other side of a kink, such as relu's")
    if text:
        return Outcome("wrong", f"{'packed' if is_packed else 'plain'} {text}; {own.failure}")
    reason = own.failure or next(iter(counts.refused - refused), "nothing to leave out")
    return Outcome("right", alone=alone) if is_packed else Outcome("plain", reason)


def _error(oracle: Loop, subject: Subject, expected: Step, got: Step, number: int) -> tuple[str, bool]:
    """Return what is wrong with a step, empty if nothing; and whether each text alone was its judge."""
    case, error = subject.case, expected.error(got)
    if case["wrapper"] in ("autocast", "bfloat16"):
        exact_case = case | {"wrapper": "none"}
        model = make_model(exact_case)
        # The same weights: what is judged is the step's rounding, and not that of the weights.
        model.load_state_dict({name: value.float() for name, value in oracle.model.state_dict().items()}, strict=False)
        precise = Loop(model, exact_case, oracle.policies)
        exact = precise.run(subject.updates[number], subject.seed + number)
        rounding = exact.error(expected)
        if (off := exact.error(got)) > MOST_TIMES * rounding + ROUNDING:
            rounding = max(rounding, _round_nearby(oracle, precise, subject, number))
        if off > MOST_TIMES * rounding + ROUNDING and any(restarts(batch) for batch in subject.updates[number]):
            alone = Loop(model, exact_case, oracle.policies, AloneWhereRestarting(model), precise.engine)
            off = min(off, alone.run(subject.updates[number], subject.seed + number).error(got))
        fine = off <= MOST_TIMES * rounding + ROUNDING
        return ("" if fine else f"error {off:.1e} beside {rounding:.1e} of the plain step"), False
    if error <= WRONG:
        return "", False
    found = float("inf")
    for kind in (Alone, AloneWhereRestarting, AloneWithoutCache):  # where neither runs, the plain step is the judge
        with suppress(Exception):
            alone = Loop(oracle.model, case, oracle.policies, kind(oracle.model), oracle.engine)
            found = min(found, alone.run(subject.updates[number], subject.seed + number).error(got))
    return ("" if found <= WRONG else f"error {error:.1e}, {found:.1e} beside each text alone"), found <= WRONG


def _round_nearby(oracle: Loop, exact: Loop, subject: Subject, number: int) -> float:
    """Return the plain step's largest rounding at weights that differ by less than theirs: a router near a tie chooses
    another expert, by an error that single weights may not show."""
    worst, kept = 0.0, {name: value.clone() for name, value in exact.model.state_dict().items()}
    generator = torch.Generator().manual_seed(number)
    own = {name: value.clone() for name, value in oracle.model.state_dict().items()}
    for _ in range(NEARBY):
        near = {
            name: value * (1 + 2**-8 * (torch.rand(value.shape, generator=generator) - 0.5))
            if value.is_floating_point()
            else value
            for name, value in kept.items()
        }
        exact.model.load_state_dict(near)
        oracle.model.load_state_dict({name: near.get(name, value) for name, value in own.items()})
        steps = [loop.run(subject.updates[number], subject.seed + number) for loop in (exact, oracle)]
        worst = max(worst, steps[0].error(steps[1]))
    oracle.model.load_state_dict(own)
    return worst


def _is_right_in_float64(subject: Subject, number: int) -> bool:
    """Return whether an update that is wrong in float32 is right in float64, where no value is next to a kink."""
    if subject.case["wrapper"] != "none":
        return False
    precise = Subject(subject.case | {"wrapper": "float64"}, subject.seed, subject.updates[: number + 1])
    return judge_loop(precise)[number].verdict == "right"


def _has_no_oracle(oracle: Loop, subject: Subject, number: int) -> bool:
    """Return whether plain forwards let texts of a row read each other, and no text alone says what the script reads:
    it compares forwards, of which those without a gradient may be either, it reads more than logits, or dropout draws
    other masks for each text alone."""
    case = subject.case
    if (
        case["loss"] not in ("clipped ratio", "scored ratio", "hidden states", "logits_to_keep")
        and case["beside"] != "tokens"
        and case["adapter"] != "lora with dropout"
    ):
        return False
    mixed = AloneWhereRestarting(oracle.model)
    return any(mixed.mixes(batch) for batch in subject.updates[number])


class Loop:
    """A training loop over one model. Its learning rate is 0, so that every update has the same weights."""

    def __init__(
        self, model: Any, case: Case, policies: list[sbp.Policy], call: Any = None, engine: Any = None
    ) -> None:
        self.model, self.case, self.policies = model, case, policies
        self._optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        self.engine = engine
        if policies and engine is None:
            self.engine = sbp.attach(model, policies, optimizer=self._optimizer)
        # What runs each text alone calls the model several times, so that the script itself applies what it declares.
        if call is not None and engine is not None:
            engine.columns()
        self._script = Script(call or model, self.engine if call is None else None, model.get_input_embeddings())
        # A power of two, which changes no bit of a gradient; the third scale is another one.
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if case["wrapper"] == "scaler" else None

    @property
    def _packing(self) -> Any:
        return next(part for part in self.engine.extensions if hasattr(part, "counts") and hasattr(part, "failure"))

    @property
    def counts(self) -> Any:
        """What was packed."""
        return self._packing.counts

    @property
    def failure(self) -> str:
        """Why packing ended."""
        return str(self._packing.failure)

    def wrap(self, call: Any) -> None:
        """Call the model through a wrapper."""
        self._script.model = call

    def forget(self) -> None:
        """Forget a step that was refused."""
        self.model.zero_grad(set_to_none=True)
        if self.engine is not None:
            self.engine.columns()

    def run(self, batches: list[Batch], seed: int) -> Step:
        """Run one update."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)  # of dropout in adapters
        if self.case["accumulation"] == "update" and self.engine is not None:
            self.engine.expect(batches)
        total, scale = 0.0, 1.0 if self._scaler is None else self._scaler.get_scale()
        for number, batch in enumerate(batches):
            with self._autocast():
                loss = LOSSES[self.case["loss"]](self._script, dict(batch), seed + 1000 * number) / len(batches)
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            scaled.backward() if self.engine is None else self.engine.backward(scaled)
            total += float(loss.detach())
        step = Step.of(self.model, total, scale)
        self._optimizer.step() if self._scaler is None else self._end_scaled()
        self.model.zero_grad(set_to_none=True)
        return step

    def _end_scaled(self) -> None:
        assert self._scaler is not None
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if self.case["wrapper"] == "autocast" else nullcontext()
