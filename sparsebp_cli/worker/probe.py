"""The probe: dense and policy passes over one batch, alternately, within the run itself.

It measures a policy's gain on this machine and model (the speed-up limit, the speed-up, and the fraction of the limit
reached). It also counts what was executed and stored, module by module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from sparsebp_cli.backward import Engine, ModuleTrace, PassCount, Proof, Report, count_flops, saved_bytes, tensor_bytes
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.saved_bytes import SavedBytes
from sparsebp_cli.plan import reached_share, speedup_limit
from sparsebp_cli.run import metric
from sparsebp_cli.worker.price import CountedPass, Shape
from sparsebp_cli.worker.step_kind import StepKind, describe_pass
from sparsebp_cli.worker.stopwatch import Stopwatch
from sparsebp_cli.worker.trial_step import Mode, PassResult, TrialStep

SQUARES = ("attention", "bmm")  # operators whose products grow with the square of the length
JUMP = 1.5  # a count above dense that exceeds the last one by this factor is repeated
# See decision 4.
ROUNDS = 3  # timed pairs; the order within a pair alternates


@dataclass(frozen=True)
class Probe:
    """Metrics and proof of one probe, and the kind of its step. ``dense`` and ``policy`` are the results of the last
    timed passes, not of the counted ones: under counters PyTorch computes some operators differently, so the last bits
    differ."""

    values: dict[str, float | None]
    proof: Proof
    kind: StepKind
    dense: PassResult
    policy: PassResult


def run_probe(trial: TrialStep, stopwatch: Stopwatch) -> Probe:
    """Run dense and policy alternately: three times timed, once under counters. The trial step must be entered."""
    seconds: dict[Mode, list[float]] = {"dense": [], "policy": []}
    left: dict[Mode, PassResult] = {}
    order: tuple[Mode, Mode] = ("dense", "policy")
    for number in range(ROUNDS):
        left.clear()
        for mode in order if number % 2 == 0 else reversed(order):
            spent, left[mode] = _time(trial, stopwatch, mode)
            seconds[mode].append(spent)
    dense, policy = _count(trial, "dense"), _count(trial, "policy")
    report = policy.report
    proof = Proof.of(trial.model, dense.cost, policy.cost, report, dense.claims)
    chosen = report.chosen
    values = _work(proof, left["policy"], trial.engine)
    values[metric.SCORING_FLOPS.name] = None if chosen is None else float(chosen.scoring_flops)
    values |= _speed(proof, median(seconds["dense"]), median(seconds["policy"]))
    return Probe(values, proof, policy.kind, left["dense"], left["policy"])


def price_pass(proof: Proof, shape: Shape) -> CountedPass:
    """Return the cost of the two counted passes over a micro-batch."""
    dense = proof.dense.flops.by_operator
    squares = sum(flops for operator, flops in dense.items() if any(part in operator for part in SQUARES))
    return CountedPass(_total(proof.policy), _total(proof.dense), float(squares), *shape)


def count_price(trial: TrialStep, shape: Shape, before: CountedPass) -> tuple[CountedPass, StepKind]:
    """Count only the policy's pass, with the draw of the next step, and return also its kind of step. Dense's count
    follows from the shape and the previous count."""
    scale = before.scale(shape)
    dense = before.dense * scale
    work = count_work(trial, "policy", max(JUMP * before.policy * scale, dense))
    attention = before.attention * shape[0] * shape[1] ** 2 / (before.examples * before.length**2)
    return CountedPass(work.flops, dense, attention, *shape), work.kind


@dataclass(frozen=True)
class PassWork:
    """The counted work of a pass."""

    flops: float  # of forward and backward
    kind: StepKind
    updated: int  # entries of the parameters that received a gradient


def count_work(trial: TrialStep, mode: Mode, usual: float = math.inf) -> PassWork:
    """Count a pass with the draw of the next step. Above ``usual`` FLOPs, count again and return the smaller."""
    counted = _count(trial, mode, draw=-1)
    flops = _total(counted.cost)
    if flops > usual:  # for example because of a check that an exact policy makes once
        flops = min(flops, _total(_count(trial, mode, draw=-1).cost))
    return PassWork(flops, counted.kind, counted.updated)


def cost_ratio(dense: PassCount, policy: PassCount) -> float:
    """Return the FLOPs of a policy's forward and backward over dense's."""
    return _total(policy) / _total(dense)


def _total(count: PassCount) -> float:
    return float(count.flops.forward.total() + count.backward_flops.total())


def _time(trial: TrialStep, stopwatch: Stopwatch, mode: Mode) -> tuple[float, PassResult]:
    with trial.on(mode) as backward:
        start = stopwatch.now()
        trial.run_batches(backward)
        return stopwatch.now() - start, trial.result()


@dataclass(frozen=True)
class _Counted:
    cost: PassCount
    report: Report
    claims: list[PassEstimate]  # of a dense pass
    kind: StepKind
    updated: int  # entries of the parameters with a gradient


def _count(trial: TrialStep, mode: Mode, draw: int = 1) -> _Counted:
    model, engine = trial.model, trial.engine
    with trial.on(mode, draw) as backward:
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            every: list[SavedBytes] = []

            @contextmanager
            def watch() -> Iterator[None]:
                with saved_bytes(model.parameters(), trace) as saved:
                    every.append(saved)
                    yield

            loss = trial.run_batches(backward, watch)
        saved = max(every, key=lambda one: one.total)  # of the micro-batch that saves most
        claiming = [part for part in engine.extensions if "claim" in part.hooks] if mode == "dense" else []
        claims = [part.claim(DensePass(loss, trace, flops)) for part in claiming]
        cost = PassCount(flops, saved)
        report = engine.report()  # not counted: it may run the model to find the usual cost of training steps
        told = [describe_pass(engine, trial.sizes)]
        kind = StepKind.of(told, engine.take_kept_share(), engine.take_chosen()) if mode == "policy" else StepKind()
        return _Counted(cost, report, claims, kind, trial.num_updated)


def _work(proof: Proof, policy: PassResult, engine: Engine) -> dict[str, float | None]:
    return {
        metric.FORWARD_FLOPS.name: float(proof.policy.flops.forward.total()),
        metric.DENSE_FORWARD.name: float(proof.dense.flops.forward.total()),
        metric.BACKWARD_EXECUTED.name: float(proof.policy.backward_flops.total()),
        metric.BACKWARD_DENSE.name: float(proof.dense.backward_flops.total()),
        metric.SAVED_BYTES.name: float(proof.policy.saved.total),
        metric.DENSE_SAVED_BYTES.name: float(proof.dense.saved.total),
        metric.GRADIENT_BYTES.name: float(_gradient_bytes(policy, engine)),
        metric.ROWS_SHARE.name: proof.rows_share,
        metric.CLAIMED_SHARE.name: proof.claimed_share,
        metric.EXECUTED_SHARE.name: proof.executed_share,
        metric.EXCESS_SHARE.name: proof.excess_share,
    }


def _gradient_bytes(policy: PassResult, engine: Engine) -> int:
    """Return the bytes of a step's gradients. A trial step keeps all gradients of whole weights. With eager updates or
    parts of weights a training step does not, so use their own counts."""
    own = next((part.gradient_bytes for part in engine.extensions if part.gradient_bytes is not None), None)
    if own is not None:
        return own
    report = None if engine.eager is None else engine.eager.report
    return tensor_bytes(policy.gradients.values()) if report is None else report.gradient_bytes


def _speed(proof: Proof, dense_seconds: float, policy_seconds: float) -> dict[str, float | None]:
    forward, dense = (float(count.total()) for count in (proof.dense.flops.forward, proof.dense.backward_flops))
    speed: dict[str, float | None] = {
        metric.PROBE_DENSE_SECONDS.name: dense_seconds,
        metric.PROBE_POLICY_SECONDS.name: policy_seconds,
        metric.SPEEDUP.name: dense_seconds / policy_seconds,
    }
    if proof.claimed_flops is None:  # routers at graph nodes claim nothing in advance
        return speed
    highest = speedup_limit(forward, dense, proof.claimed_flops, proof.claimed_forward_flops)
    share = reached_share(dense_seconds, policy_seconds, highest)
    return speed | {metric.LIMIT.name: highest, metric.REACHED_SHARE.name: share}
