"""The probe: dense and policy on one and the same batch, in turn, in the run itself.

It answers what a policy is worth on this machine and model: the ceiling, the speed-up and the share of it that was
realised, and proves what was executed and stored, module by module.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from sparsebp_cli.backward import Engine, ModuleTrace, PassCount, Proof, Report, count_flops, saved_bytes, tensor_bytes
from sparsebp_cli.backward.core.extension import EstimatesFlops
from sparsebp_cli.backward.observe.claim import DensePass, PassEstimate
from sparsebp_cli.plan import ceiling, realised_share
from sparsebp_cli.run import metric
from sparsebp_cli.worker.rehearsal import Outcome, Rehearsal, Way
from sparsebp_cli.worker.stopwatch import Stopwatch

ROUNDS = 3  # timed pairs; the order within a pair alternates


@dataclass(frozen=True)
class Probe:
    """What a probe found.

    Args:
        values: Metric values by name; None where there is none.
        proof: What was executed and stored.
        dense: What the last timed dense pass left. Not the counted one: under counters PyTorch takes other ways
            through some operators, whose last bits differ.
        policy: What the last timed pass with the policy left.
    """

    values: dict[str, float | None]
    proof: Proof
    dense: Outcome
    policy: Outcome


def run_probe(rehearsal: Rehearsal, stopwatch: Stopwatch) -> Probe:
    """Run dense and policy in turn: three times under the clock, once under counters.

    Args:
        rehearsal: Entered.
        stopwatch: For the clock.

    Returns:
        What was found.
    """
    seconds: dict[Way, list[float]] = {"dense": [], "policy": []}
    left: dict[Way, Outcome] = {}
    order: tuple[Way, Way] = ("dense", "policy")
    for number in range(ROUNDS):
        left.clear()
        for way in order if number % 2 == 0 else reversed(order):
            spent, left[way] = _time(rehearsal, stopwatch, way)
            seconds[way].append(spent)
    dense, _, claims = _count(rehearsal, "dense")
    policy, report, _ = _count(rehearsal, "policy")
    proof = Proof.of(rehearsal.model, dense, policy, report, claims)
    chosen = report.chosen
    values = _work(proof, left["policy"], rehearsal.engine)
    values[metric.SCORING_FLOPS.name] = None if chosen is None else float(chosen.scoring_flops)
    values |= _speed(proof, median(seconds["dense"]), median(seconds["policy"]))
    return Probe(values, proof, left["dense"], left["policy"])


def count_cost(rehearsal: Rehearsal) -> float:
    """Return what a step of the policy costs over a dense one, in FLOPs of forward and backward as counted.

    Args:
        rehearsal: Entered.

    Returns:
        The ratio.
    """
    (dense, _, _), (policy, _, _) = _count(rehearsal, "dense"), _count(rehearsal, "policy")
    return cost_ratio(dense, policy)


def cost_ratio(dense: PassCount, policy: PassCount) -> float:
    """Return what one pass costs over another, in FLOPs of forward and backward.

    Args:
        dense: The other.
        policy: The one.

    Returns:
        The ratio.
    """
    one, other = (count.flops.forward.total() + count.backward_flops.total() for count in (policy, dense))
    return one / other


def _time(rehearsal: Rehearsal, stopwatch: Stopwatch, way: Way) -> tuple[float, Outcome]:
    with rehearsal.on(way) as backward:
        start = stopwatch.now()
        backward(rehearsal.forward())
        return stopwatch.now() - start, rehearsal.outcome()


def _count(rehearsal: Rehearsal, way: Way) -> tuple[PassCount, Report, list[PassEstimate]]:
    model, engine = rehearsal.model, rehearsal.engine
    # Under counters some operators make other nodes than in training: what was cut there has no place here.
    with rehearsal.on(way, feedback=False) as backward, ModuleTrace(model) as trace, count_flops(trace) as flops:
        with saved_bytes(model.parameters(), trace) as saved:
            loss = rehearsal.forward()
        backward(loss)
        claiming = [part for part in engine.extensions if isinstance(part, EstimatesFlops)] if way == "dense" else []
        claims = [part.claim(DensePass(loss, trace, flops)) for part in claiming]
        return PassCount(flops, saved), engine.report(), claims


def _work(proof: Proof, policy: Outcome, engine: Engine) -> dict[str, float | None]:
    return {
        metric.FORWARD_FLOPS.name: float(proof.policy.flops.forward.total()),
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


def _gradient_bytes(policy: Outcome, engine: Engine) -> int:
    """A probe keeps all gradients; under an eager update a step of training does not."""
    report = None if engine.eager is None else engine.eager.report
    return tensor_bytes(policy.gradients.values()) if report is None else report.gradient_bytes


def _speed(proof: Proof, dense_seconds: float, policy_seconds: float) -> dict[str, float | None]:
    forward, dense = (float(count.total()) for count in (proof.dense.flops.forward, proof.dense.backward_flops))
    speed: dict[str, float | None] = {
        metric.PROBE_DENSE_SECONDS.name: dense_seconds,
        metric.PROBE_POLICY_SECONDS.name: policy_seconds,
        metric.SPEEDUP.name: dense_seconds / policy_seconds,
    }
    if proof.claimed_flops is None:  # at graph nodes nothing is claimed beforehand
        return speed
    highest = ceiling(forward, dense, proof.claimed_flops, proof.claimed_forward_flops)
    share = realised_share(dense_seconds, policy_seconds, highest)
    return speed | {metric.CEILING.name: highest, metric.REALISED_SHARE.name: share}
