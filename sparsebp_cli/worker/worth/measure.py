"""Measurement of policies at several points of one dense training: price, noise and bias, in units of a dense step.

Weights, optimizer and batches are those of the recipe; every policy is measured on the same batches at the same
weights, and none of its gradients is trained on. Each point has some pairs of small batches, each policy two draws on
each of them, and what its pass costs is counted there; that of an exact policy, which may leave out padding or what
examples share, on whole batches of the recipe. Gradients of a point are held at once: it takes the memory of 2 * PAIRS
+ 4 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward import Engine, count_flops
from sparsebp_cli.backward.attachment import validates
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.errors import DataError, SparseBPError, UsageError
from sparsebp_cli.plan.exchange import (
    BatchPair,
    Interval,
    StepCost,
    combine,
    estimate_share,
    give_verdict,
)
from sparsebp_cli.policy import (
    EpochSelector,
    Policy,
    Stateful,
    TokenSelector,
    find_policies,
    make_policy,
)
from sparsebp_cli.policy.discovery import FoundPolicy
from sparsebp_cli.recipe.composition import refuse_unsupported
from sparsebp_cli.recipe.description import describe_policy
from sparsebp_cli.recipe.schema import PolicyEntry, Recipe
from sparsebp_cli.run.policy_phase import PolicyPhase
from sparsebp_cli.worker.batch import num_targets
from sparsebp_cli.worker.policy_phase import compares, make_phases
from sparsebp_cli.worker.price import find_updated
from sparsebp_cli.worker.probe import count_pass
from sparsebp_cli.worker.training import Training
from sparsebp_cli.worker.trial_step import Mode, TrialStep, trainable_parameters
from sparsebp_cli.worker.worth.squares import Gradients, Metric, Squares, minus, square_between, square_errors

POINTS = (1 / 6, 1 / 2, 1.0)  # of the steps of the dense training
MOST_STEPS = 30
PAIRS = 3  # of batches at a point
WHOLE = 2  # whole batches at a point on which exact policies are counted
COUNTED = 2  # small batches at a point on which other policies are counted: counting takes as long as three passes
EXAMPLES = 4  # of each: an error and the variance between batches both go as one over their size
AHEAD = 100  # steps over which trial passes are averaged
LATER = (0.6, 0.95)  # shares of a training at which a policy that leaves nothing out at a point may do so
ROUNDING = 1e-8  # of an error's square over the gradient's: below it a policy computes the dense gradient
SHARE = 0.5  # of a policy that must be told what to keep, where all are measured
Report = Callable[[str, int, int], None]


@dataclass
class Candidate:
    """A policy that is measured, and what was found so far."""

    name: str  # as the recipe would write it: name and options
    policies: Sequence[Policy]
    pairs: dict[str, list[list[BatchPair]]] = field(default_factory=lambda: {"plain": [], "adam": []})
    by_part: dict[str, list[float]] = field(default_factory=dict)  # squares of noise and bias, and between batches
    passes: list[tuple[float, float]] = field(default_factory=list)  # FLOPs of it and of dense, for each counted batch
    fixed: list[float] = field(default_factory=list)  # FLOPs of update and trial passes, a value for each point
    step: int | None = None  # at which it was measured instead, since it leaves nothing out at the points
    failure: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether all of its policies declare the dense gradient."""
        return all(policy.exact for policy in self.policies)


def measure(training: Training, *, all_policies: bool, report: Report) -> dict[str, object]:
    """Measure the recipe's policies, and with ``all_policies`` all others that apply to it as well."""
    recipe = training.plan.recipe
    if recipe.backward.update == "eager":
        raise UsageError("backward.update: eager has the gradients of deferred: give --set backward.update=deferred")
    candidates, left_out = find_candidates(recipe, all_policies=all_policies)
    last = min(MOST_STEPS, recipe.training.max_steps)
    steps = sorted({max(1, round(last * point)) for point in POINTS})
    total = last + len(steps) * 2 * PAIRS * (1 + 2 * len(candidates))
    run = _DenseRun(training, report, total)
    dense_passes = list[float]()
    for step in steps:
        run.train_to(step)
        point = _Point(run, step)
        dense_passes += point.whole_flops
        for candidate in candidates:
            if not candidate.failure:
                run.tell(f"step {step}: {candidate.name}", 0)
                try:
                    point.measure(candidate)
                except SparseBPError as error:
                    candidate.failure = str(error)
            run.done += 4 * PAIRS
    left_out += [{"name": one.name, "why": one.failure} for one in candidates if one.failure]
    dense = StepCost(fmean(dense_passes) * recipe.training.gradient_accumulation_steps, run.update_flops)
    metric = "adam" if run.has_moments else "plain"
    batch = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    found = [_sum_up(one, dense, metric, batch) for one in candidates if not one.failure]
    return {
        "format": 1,
        "recipe": recipe.name,
        "steps": steps,
        "batch": batch,
        "batches": 2 * PAIRS * len(steps),
        "examples": EXAMPLES,
        "metric": metric,
        "dense_step_flops": dense.total,
        "policies": found,
        "left_out": left_out,
    }


def find_candidates(recipe: Recipe, *, all_policies: bool) -> tuple[list[Candidate], list[dict[str, str]]]:
    """Return the policies to be measured, those of the recipe first, and the name and reason of each that is not."""
    found, left_out = list[Candidate](), list[dict[str, str]]()
    for phase, made in zip(recipe.phases, make_phases(recipe), strict=True):
        name = ", ".join(describe_policy(entry.model_dump()) for entry in phase.policies) or "dense"
        why = next(filter(None, map(_find_reason, made.policies)), "")
        if why:
            left_out.append({"name": name, "why": why})
        else:
            found.append(Candidate(name, made.policies))
    if all_policies:
        own = {candidate.name for candidate in found}
        for name, installed in find_policies().items():
            candidate = _try_candidate(recipe, name, installed)
            if isinstance(candidate, str):
                left_out.append({"name": name, "why": candidate})
            elif candidate.name not in own:
                found.append(candidate)
    return found, left_out


def _try_candidate(recipe: Recipe, name: str, installed: FoundPolicy) -> Candidate | str:
    """Return an installed policy with its defaults, and half of everything where it must be told a share; or why it is
    not measured."""
    if installed.policy_class is None:
        return f"broken: {installed.problem}"
    required = [key for key, option in installed.policy_class.model_fields.items() if option.is_required()]
    if set(required) - {"keep"}:
        return f"needs {', '.join(required)}: name it in the recipe's policy"
    options: dict[str, Any] = {"keep": SHARE} if required else {}
    changed = recipe.model_copy(update={"policy": [PolicyEntry(name=name, **options)], "schedule": None})
    try:
        refuse_unsupported(changed)
        policy = make_policy(name, **options)
    except SparseBPError as error:
        return str(error)
    return _find_reason(policy) or (
        "needs a reference model, which the recipe's own policies do not have"
        if compares(policy)
        else "needs validation examples, which are set aside for the recipe's own policies alone"
        if validates(policy)
        else "reads columns of the data: name it in the recipe's policy"
        if isinstance(policy, TokenSelector) and policy.reads
        else Candidate(describe_policy({"name": name} | options), [policy])
    )


def _find_reason(policy: Policy) -> str:
    return "chooses whole epochs: there is nothing to measure on a batch" if isinstance(policy, EpochSelector) else ""


class _DenseRun:
    """The dense training at whose points policies are measured."""

    def __init__(self, training: Training, report: Report, total: int) -> None:
        self.training, self._report, self._total, self.done = training, report, total, 0
        self.step, self.update_flops, self.per_entry = 0, 0.0, 0.0
        self.has_moments = False
        training.engine.detach()
        training.model.train()  # as loaded it is in evaluation mode: no dropout, and nothing is chosen of batches
        self.part_of = LayerNumbers(training.bare).part_of
        self._engine = self.attach([make_policy("dense")])
        self.names = trainable_parameters(training.bare, self._engine)

    def tell(self, what: str, passes: int) -> None:
        """Report what comes now, and how many passes are done."""
        self._report(what, self.done, self._total)
        self.done += passes

    def attach(self, policies: Sequence[Policy]) -> Engine:
        """Attach policies as if they had been there since the first step."""
        sequence = self.training.phases
        phase = PolicyPhase(policies, None, self.step, self.step + 1, ())
        engine = sequence.attach(phase)
        engine.load_state_dict(engine.state_dict() | {"index": self.step})
        sequence.set_columns(self.training.order, phase)
        return engine

    def train_to(self, step: int) -> None:
        """Make dense steps until so many are done."""
        training, recipe = self.training, self.training.plan.recipe.training
        while self.step < step:
            self.tell(f"dense step {self.step + 1} of {step}", 1)
            first = self.step * recipe.gradient_accumulation_steps
            shares = [training.order.rank_part(n) for n in range(first, first + recipe.gradient_accumulation_steps)]
            targets = sum(count for _, count in shares)
            for number, (batch, _) in enumerate(shares, first):
                self._engine.backward(training.loss_of(number, batch, targets), training.accelerator.backward)
            counting = UpdateFlops()
            with counting:
                updated, _ = find_updated(training.optimizer, all_of_them=False)
                training.clip(recipe.max_grad_norm)
                training.optimizer.step()
            training.schedule.step()
            training.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.update_flops, self.per_entry = float(counting.flops), counting.flops / max(1, updated)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the dense engine off, so that others can be attached, and attach it again."""
        self._engine.detach()
        state = self.training.optimizer.optimizer.state
        before = {parameter: dict(values) for parameter, values in state.items()}
        try:
            yield
        finally:
            state.clear()  # policies that freeze parameters for good drop their state
            state.update(before)
            self._engine = self.attach([make_policy("dense")])


class _Point:
    """Some pairs of batches at the weights of one step, with their dense gradients."""

    def __init__(self, run: _DenseRun, step: int) -> None:
        self._run, training = run, run.training
        first = step * training.plan.recipe.training.gradient_accumulation_steps
        self._numbers = range(first, first + 2 * PAIRS)
        self._dense: list[dict[str, Tensor | None]] = []
        self._flops: list[float] = []  # of a dense pass over each small batch that is counted
        with run.paused():
            engine = run.attach([make_policy("dense")])
            for number in self._numbers:
                run.tell(f"step {step}: dense", 1)
                with self._trial(engine, number, EXAMPLES) as trial:
                    self._dense.append(trial.run("dense").gradients)
                    if len(self._flops) < COUNTED:
                        self._flops.append(count_pass(trial, "dense"))
            self.whole_flops = [self._count_whole(engine, number, "dense") for number in range(WHOLE)]
            engine.detach()
        self._metric = Metric(training.optimizer.optimizer, run.names)
        run.has_moments = self._metric.exists
        self._between = [square_between(*pair, self._metric, run.part_of) for pair in self._pairs(self._dense)]
        least = ROUNDING * min(map(_square, self._dense))
        if min(_total(between, "plain") for between in self._between) <= least:
            raise DataError(
                "two batches have the same gradient, so there is no noise between batches to measure by: the training "
                f"set has {len(training.order.examples)} examples"
            )

    def measure(self, candidate: Candidate) -> None:
        """Add what a policy's gradients are at this point. Raises ``SparseBPError`` where it does not go with the
        model."""
        with self._run.paused(), ExitStack() as stack:
            engine = self._run.attach(candidate.policies)
            stack.callback(engine.detach)
            trials = self._run_trials(engine)
            self._go_where_it_acts(candidate, engine)
            errors = [self._measure_batch(candidate, engine, index) for index in range(2 * PAIRS)]
            updated = self._count_updated
            if candidate.is_exact:
                mine = [self._count_whole(engine, number, "policy") for number in range(WHOLE)]
                candidate.passes += zip(mine, self.whole_flops, strict=True)
        candidate.fixed.append(self._run.per_entry * updated + trials)
        for name, of in candidate.pairs.items():
            of.append([self._pair(name, number, *pair) for number, pair in enumerate(self._pairs(errors))])
        self._add_parts(candidate, errors)

    def _measure_batch(self, candidate: Candidate, engine: Engine, index: int) -> tuple[Squares, Squares]:
        dense = self._dense[index]
        with self._trial(engine, self._numbers[index], EXAMPLES) as trial:
            draws: list[Gradients] = []
            for draw in (1, 2):  # numbers of their own, since a step's draws are the same on every batch
                draws.append(trial.run("policy", 2 * index + draw).gradients)
                _refuse_other_shapes(dense, draws[-1])
                if draw == 1 and candidate.is_exact:
                    draws.append(draws[0])
                    break
            if not candidate.is_exact and index < COUNTED:
                candidate.passes.append((count_pass(trial, "policy", 2 * index + 1), self._flops[index]))
            self._count_updated = sum(
                self._run.names[name].numel() for name, gradient in draws[0].items() if gradient is not None
            )
        return square_errors(dense, (draws[0], draws[1]), self._metric, self._run.part_of)

    def _run_trials(self, engine: Engine) -> float:
        """Make the trial passes before this step, or before the next that has some, so that states are what they would
        be, and return their FLOPs over the steps between them."""
        due = [ahead for ahead in range(AHEAD) if engine.trials_are_due(ahead)]
        if not due:
            return 0.0
        _go_to(engine, self._run.step + due[0])
        training, first = self._run.training, self._numbers[0]
        batch, targets = training.order.rank_part(first)
        others = [
            partial(training.loss_of, first + more, training.order.rank_part(first + more)[0], targets)
            for more in range(1, engine.count_trial_batches())
        ]
        with count_flops() as flops:
            loss = partial(training.loss_of, first, batch, targets)
            engine.run_trials(loss, training.accelerator.backward, others=others)
        return float(flops.total) * len(due) / AHEAD

    def _go_where_it_acts(self, candidate: Candidate, engine: Engine) -> None:
        """Take a policy that has a schedule of its own to a step at which it leaves something out, if there is one."""
        if candidate.is_exact or self._acts(engine):
            return
        num_steps = self._run.training.plan.recipe.training.max_steps
        for step in (round(share * num_steps) + more for share in LATER for more in (0, 1)):
            _go_to(engine, step)
            if self._acts(engine):
                candidate.step = step
                return
        _go_to(engine, self._run.step)

    def _acts(self, engine: Engine) -> bool:
        with self._trial(engine, self._numbers[0], EXAMPLES) as trial:
            found, dense = trial.run("policy", 1).gradients, self._dense[0]
        _refuse_other_shapes(dense, found)
        error = {name: minus(found[name], gradient) for name, gradient in dense.items()}
        return _square(error) > ROUNDING * _square(dense)

    def _count_whole(self, engine: Engine, number: int, mode: Mode) -> float:
        with self._trial(engine, self._numbers[number]) as trial:
            return count_pass(trial, mode)

    def _trial(self, engine: Engine, number: int, most: int | None = None) -> TrialStep:
        """Return a trial step of a micro-batch, or of its first examples."""
        training = self._run.training
        batch = {name: tensor[:most] for name, tensor in training.order.rank_part(number)[0].items()}
        targets = max(1, num_targets(batch, training.order.candidates))
        loss = partial(training.loss_of, number, batch, targets)
        return TrialStep(training.bare, engine, loss, training.accelerator.backward)

    def _pairs(self, values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return zip(values[::2], values[1::2], strict=True)

    def _pair(
        self, metric: str, number: int, one: tuple[Squares, Squares], other: tuple[Squares, Squares]
    ) -> BatchPair:
        noise, bias = (fmean(_total(each[kind], metric) for each in (one, other)) for kind in (0, 1))
        norm = fmean(_square(self._dense[2 * number + more]) for more in (0, 1))
        if fmean(_total(each[0], "plain") + abs(_total(each[1], "plain")) for each in (one, other)) < ROUNDING * norm:
            noise = bias = 0.0
        return BatchPair(_total(self._between[number], metric), noise, bias)

    def _add_parts(self, candidate: Candidate, errors: Sequence[tuple[Squares, Squares]]) -> None:
        metric = "adam" if self._run.has_moments else "plain"
        for part in self._between[0].sums[metric]:
            sums = candidate.by_part.setdefault(part, [0.0, 0.0, 0.0])
            for noise, bias in errors:
                sums[0] += noise.sums[metric].get(part, 0.0) / 2
                sums[1] += bias.sums[metric].get(part, 0.0) / 2
            sums[2] += sum(between.sums[metric][part] for between in self._between)


def _sum_up(
    candidate: Candidate,
    dense: StepCost,
    metric: str,
    batch: int,
) -> dict[str, object]:
    share = Interval.of_ratio(candidate.passes)
    policy = StepCost(share.value * dense.passes, fmean(candidate.fixed))
    ends = [(end * dense.passes + policy.fixed) / dense.total for end in (share.value, share.low, share.high)]
    price = Interval(*ends)
    noise, bias = (estimate_share(candidate.pairs[metric], of) for of in (lambda p: p.noise, lambda p: p.bias))
    plain = estimate_share(candidate.pairs["plain"], lambda pair: pair.noise)
    product = combine(noise, price, policy, dense)
    unbiased = all(policy.exact or policy.unbiased for policy in candidate.policies)
    verdict = give_verdict(product, noise, bias, exact=candidate.is_exact, unbiased=unbiased)
    remembers = any(isinstance(policy, Stateful) and not policy.exact for policy in candidate.policies)
    return {
        "name": candidate.name,
        "price": vars(price),
        "noise": vars(noise),
        "noise_plain": vars(plain),
        "bias": vars(bias),
        "product": vars(product),
        "dense_batch": batch / (1.0 + max(0.0, noise.value)),
        "verdict": verdict,
        "remembers": remembers,
        "as_at_step": candidate.step,
        "by_part": {
            part: {"noise": noise_of / between, "bias": bias_of / between}
            for part, (noise_of, bias_of, between) in candidate.by_part.items()
            if between > 0
        },
    }


def _go_to(engine: Engine, step: int) -> None:
    engine.load_state_dict(engine.state_dict() | {"index": step})


def _refuse_other_shapes(dense: Gradients, gradients: Gradients) -> None:
    for name, gradient in gradients.items():
        theirs = dense[name]
        if gradient is not None and theirs is not None and gradient.shape != theirs.shape:
            raise SparseBPError(f"trains parts of {name}, which have no gradient of the whole")


def _total(squares: Squares, metric: str) -> float:
    return sum(squares.sums[metric].values())


def _square(gradients: Mapping[str, Tensor | None]) -> float:
    return sum(float(g.float().square().sum(dtype=torch.float64)) for g in gradients.values() if g is not None)
