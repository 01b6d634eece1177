"""Measure policies at several points of one dense training: cost, variance and bias, in units of a dense step.

Weights, optimizer and batches come from the recipe. Every policy is measured on the same batches at the same weights,
and none of its gradients is trained on. Each point has some pairs of small batches; each policy draws twice on the
first batch of each pair. The cost of a step is counted as in runs, on micro-batches of the recipe, at steps spread over
the whole training. All gradients of a point are held at once: 7 * PAIRS + 6 of them.
"""

from __future__ import annotations

import math
from statistics import fmean

from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.policy import Stateful
from sparsebp_cli.worker.training import Training
from sparsebp_lab.exchange import DenseStepCost, RateInterval, combine, estimate_share, give_verdict, quantile
from sparsebp_lab.worth.candidate import Candidate, find_candidates
from sparsebp_lab.worth.dense_run import DenseRun, Report
from sparsebp_lab.worth.point import EXAMPLES, GradientPoint
from sparsebp_lab.worth.step_length import StepShare, share_of_batch

POINTS = (1 / 6, 1 / 2, 1.0)  # fractions of the dense training's steps
MOST_STEPS = 30
PAIRS = 3  # pairs of batches at a point


def measure(training: Training, *, all_policies: bool, report: Report, pairs: int = PAIRS) -> dict[str, object]:
    """Measure the recipe's policies, and with ``all_policies`` all others that apply to it, on ``pairs`` pairs of
    batches at each point."""
    recipe = training.plan.recipe
    if recipe.backward.update == "eager":
        raise UsageError(
            "this estimate does not support 'backward.update: eager': add --set backward.update=deferred, which "
            "has the same gradients"
        )
    candidates, left_out = find_candidates(recipe, all_policies=all_policies)
    last = min(MOST_STEPS, recipe.training.max_steps)
    steps = sorted({max(1, round(last * point)) for point in POINTS})
    total = last + len(steps) * 2 * pairs * (1 + len(candidates))
    run = DenseRun(training, report, total)
    dense_passes = list[float]()
    for step in steps:
        run.train_to(step)
        with run.paused():
            point = GradientPoint(run, step, pairs)
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
    dense = DenseStepCost(fmean(dense_passes) * recipe.training.gradient_accumulation_steps, run.update_flops)
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
    dense: DenseStepCost,
    metric: str,
    batch: int,
) -> dict[str, object]:
    share = RateInterval.of_ratio(candidate.passes)
    policy = DenseStepCost(share.value * dense.passes, fmean(candidate.fixed))
    # The cost at the measured steps, because both factors of a product must belong to the same steps.
    there = RateInterval(*((end * dense.passes + policy.fixed) / dense.total for end in vars(share).values()))
    # The cost over the whole training, as in its event log.
    trials = fmean(candidate.trials) / dense.total
    price = RateInterval(*(end + trials for end in vars(RateInterval.of_ratio(candidate.steps)).values()))
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


def _find_rate(candidate: Candidate, curved: RateInterval, freedom: int) -> dict[str, float] | None:
    """Return the fraction of dense's learning rate with which a policy trains, relative to dense with the batch of the
    same curvature-weighted variance; None without second moments, or if too few batches show the downhill direction."""
    if not candidate.lengths:
        return None
    policy = StepShare.of_mean([share for share, _ in candidate.lengths])
    dense = {
        end: StepShare.of_mean([share_of_batch(shares, noise) for _, shares in candidate.lengths]).value
        for end, noise in vars(curved).items()
    }
    if min(policy.value, *dense.values()) <= 0.0:
        return None
    value = policy.value / dense["value"]
    error = quantile(freedom) * math.sqrt(policy.variance) / dense["value"]
    # More curvature-weighted noise shortens dense's step, and so raises the relative fraction.
    low, high = (math.hypot(error, policy.value / dense[end] - value) for end in ("low", "high"))
    return {"value": value, "low": value - low, "high": value + high}


def _find_curved(candidate: Candidate) -> RateInterval | None:
    """Return the curvature-weighted noise, over the points at which the loss is curved upwards along the differences of
    batches; None without such points, or if weights are too coarse."""
    points = candidate.pairs["curved"]
    if points and not any(pair.noise for pairs in points for pair in pairs):
        return RateInterval.exactly(0.0)
    # A jackknife leaves one pair out, so the remaining sum must be positive as well.
    curved = [pairs for pairs in points if all(sum(p.between for p in pairs) - one.between > 0.0 for one in pairs)]
    return estimate_share(curved, lambda pair: pair.noise) if curved else None
