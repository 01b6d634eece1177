"""Measurement of policies at several points of one dense training: price, noise and bias, in units of a dense step.

Weights, optimizer and batches are those of the recipe; every policy is measured on the same batches at the same
weights, and none of its gradients is trained on. Each point has some pairs of small batches, each policy two draws on
the first of each pair. What its step costs is counted as runs count it: on micro-batches of the recipe, at steps that
are spread over the whole training. Gradients of a point are held at once: it takes the memory of
7 * PAIRS + 6 of them.
"""

from __future__ import annotations

import math
from statistics import fmean

from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.policy import Stateful
from sparsebp_cli.worker.training import Training
from sparsebp_lab.exchange import Interval, StepCost, combine, estimate_share, give_verdict, quantile
from sparsebp_lab.worth.candidate import Candidate, find_candidates
from sparsebp_lab.worth.dense_run import DenseRun, Report
from sparsebp_lab.worth.point import EXAMPLES, Point
from sparsebp_lab.worth.step_length import Share, share_of_batch

POINTS = (1 / 6, 1 / 2, 1.0)  # of the steps of the dense training
MOST_STEPS = 30
PAIRS = 3  # of batches at a point


def measure(training: Training, *, all_policies: bool, report: Report, pairs: int = PAIRS) -> dict[str, object]:
    """Measure the recipe's policies, and with ``all_policies`` all others that apply to it as well, on so many pairs of
    batches at each point."""
    recipe = training.plan.recipe
    if recipe.backward.update == "eager":
        raise UsageError("backward.update: eager has the gradients of deferred: give --set backward.update=deferred")
    candidates, left_out = find_candidates(recipe, all_policies=all_policies)
    last = min(MOST_STEPS, recipe.training.max_steps)
    steps = sorted({max(1, round(last * point)) for point in POINTS})
    total = last + len(steps) * 2 * pairs * (1 + len(candidates))
    run = DenseRun(training, report, total)
    dense_passes = list[float]()
    for step in steps:
        run.train_to(step)
        with run.paused():
            point = Point(run, step, pairs)
            dense_passes += point.whole_flops
            for candidate in candidates:
                if not candidate.failure:
                    run.tell(f"step {step}: {candidate.name}", 0)
                    try:
                        point.measure(candidate, is_last=step == steps[-1])
                    except SparseBPError as error:
                        candidate.failure = str(error)
                run.done += 2 * pairs
    left_out += [{"name": one.name, "why": one.failure} for one in candidates if one.failure]
    dense = StepCost(fmean(dense_passes) * recipe.training.gradient_accumulation_steps, run.update_flops)
    metric = "adam" if run.has_moments else "plain"
    batch = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    found = [_sum_up(one, dense, metric, batch) for one in candidates if not one.failure]
    return {
        "format": 2,
        "recipe": recipe.name,
        "steps": steps,
        "batch": batch,
        "batches": 2 * pairs * len(steps),
        "examples": min(EXAMPLES, recipe.training.per_device_train_batch_size),
        "metric": metric,
        "dense_step_flops": dense.total,
        "policies": found,
        "left_out": left_out,
    }


def _sum_up(
    candidate: Candidate,
    dense: StepCost,
    metric: str,
    batch: int,
) -> dict[str, object]:
    share = Interval.of_ratio(candidate.passes)
    policy = StepCost(share.value * dense.passes, fmean(candidate.fixed))
    # Where it was measured: errors and cost of a product belong to the same steps.
    there = Interval(*((end * dense.passes + policy.fixed) / dense.total for end in vars(share).values()))
    # Over the whole training, as its event log has it.
    trials = fmean(candidate.trials) / dense.total
    price = Interval(*(end + trials for end in vars(Interval.of_ratio(candidate.steps)).values()))
    noise, bias = (estimate_share(candidate.pairs[metric], of) for of in (lambda p: p.noise, lambda p: p.bias))
    plain = estimate_share(candidate.pairs["plain"], lambda pair: pair.noise)
    everywhere = combine(noise, there, policy, dense)
    unbiased = all(policy.exact or policy.unbiased for policy in candidate.policies)
    curved = _find_curved(candidate)
    freedom = sum(len(pairs) - 1 for pairs in candidate.pairs["plain"])
    product = everywhere if curved is None else combine(curved, there, policy, dense)
    verdict = give_verdict(product, noise, bias, exact=candidate.is_exact, unbiased=unbiased)
    remembers = any(isinstance(policy, Stateful) and not policy.exact for policy in candidate.policies)
    return {
        "name": candidate.name,
        "price": vars(price),
        "noise": vars(noise),
        "noise_curved": None if curved is None else vars(curved),
        "noise_plain": vars(plain),
        "rate": None if curved is None else _find_rate(candidate, curved, freedom),
        "bias": vars(bias),
        "product": vars(product),
        "product_all_directions": vars(everywhere),
        "dense_batch": batch / (1.0 + max(0.0, noise.value)),
        "dense_batch_curved": None if curved is None else batch / (1.0 + max(0.0, curved.value)),
        "verdict": verdict,
        "remembers": remembers,
        "as_at_step": candidate.step,
        "by_part": {
            part: {"noise": noise_of / between, "bias": bias_of / between}
            for part, (noise_of, bias_of, between) in candidate.by_part.items()
            if between > 0
        },
    }


def _find_rate(candidate: Candidate, curved: Interval, freedom: int) -> dict[str, float] | None:
    """Return the share of dense's learning rate that a policy trains with, beside dense with the batch that has as much
    noise by curvature; None without second moments, or where too few batches tell which way is downhill."""
    if not candidate.lengths:
        return None
    policy = Share.of_mean([share for share, _ in candidate.lengths])
    dense = {
        end: Share.of_mean([share_of_batch(shares, noise) for _, shares in candidate.lengths]).value
        for end, noise in vars(curved).items()
    }
    if min(policy.value, *dense.values()) <= 0.0:
        return None
    value = policy.value / dense["value"]
    error = quantile(freedom) * math.sqrt(policy.variance) / dense["value"]
    # More noise by curvature is a shorter step of dense, and so a larger share beside it.
    low, high = (math.hypot(error, policy.value / dense[end] - value) for end in ("low", "high"))
    return {"value": value, "low": value - low, "high": value + high}


def _find_curved(candidate: Candidate) -> Interval | None:
    """Return the noise with the loss's curvature between, over the points at which the loss is curved upwards along the
    differences of batches; None where it is so at none, or weights are too coarse."""
    points = candidate.pairs["curved"]
    if points and not any(pair.noise for pairs in points for pair in pairs):
        return Interval.exactly(0.0)
    # A jackknife leaves a pair out, so what the others sum up to must be positive as well.
    curved = [pairs for pairs in points if all(sum(p.between for p in pairs) - one.between > 0.0 for one in pairs)]
    return estimate_share(curved, lambda pair: pair.noise) if curved else None
