"""Measure with pairs of batches at the weights of one step of the dense training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from sparsebp_cli.backward import Engine, count_flops
from sparsebp_cli.errors import DataError, SparseBPError
from sparsebp_cli.policy import make_policy
from sparsebp_cli.worker.probe import count_work
from sparsebp_cli.worker.trial_step import TrialStep
from sparsebp_lab.exchange import BatchPair
from sparsebp_lab.worth.candidate import Candidate
from sparsebp_lab.worth.curvature import Curvature
from sparsebp_lab.worth.dense_run import DenseRun, go_to
from sparsebp_lab.worth.run_cost import is_known, spread
from sparsebp_lab.worth.squares import (
    Gradients,
    Squares,
    WorthMetric,
    inner,
    minus,
    square_between,
    square_errors,
    square_gradient,
)
from sparsebp_lab.worth.step_length import StepLength, square_halves

WHOLE = 2  # recipe micro-batches at a point on which passes are counted
EXAMPLES = 4  # of a small batch: errors and the variance between batches both scale as one over their number
CURVED = 8  # examples of the curvature's loss, the same for all errors and batches
AHEAD = 100  # most steps over which trial passes are averaged
LATER = (0.6, 0.95)  # fractions of a training at which to measure a policy that leaves nothing out at a point
SHOWN = 3  # steps shown to policies with state when the cost of later steps is counted
ROUNDING = 1e-8  # error's square over the gradient's: below it a policy computes the dense gradient


@dataclass(frozen=True)
class BatchError:
    """Squares of a policy's error on one batch."""

    noise: Squares
    bias: Squares
    curved: float  # curvature-weighted noise
    entries: Mapping[str, Tensor]  # squares of the noise by parameter, if the optimizer has moments


@dataclass(frozen=True)
class BatchDraw:
    """A policy's gradients on one batch."""

    gradients: Gradients
    is_random: bool  # it used random numbers; otherwise each draw is the same


class GradientPoint:
    """Pairs of batches at the weights of one step, with their dense gradients. The run must be paused."""

    def __init__(self, run: DenseRun, step: int, pairs: int) -> None:
        self._run, training = run, run.training
        first = step * training.plan.recipe.training.gradient_accumulation_steps
        self._numbers = range(first, first + 2 * pairs)
        self._dense: list[dict[str, Tensor | None]] = []
        # Policies are measured on the first batch of each pair, so all share dense's gradients.
        self._measured = range(0, 2 * pairs, 2)
        self._draws = [run.number_draws(number, EXAMPLES) for number in self._numbers]
        with run.attached([make_policy("dense")]) as engine:
            for number in self._numbers:
                run.tell(f"step {step}: dense", 1)
                with run.trial(engine, number, EXAMPLES) as trial:
                    self._dense.append(trial.run("dense").gradients)
            self.whole_flops = [run.count_dense(engine, number) for number in self._numbers[:WHOLE]]
            self._metric = WorthMetric(training.optimizer.optimizer, run.names)
            self._curvature: Curvature | None = None
            if Curvature.is_measurable(run.names, training.plan.recipe.training.mixed_precision):
                self._curvature = Curvature(run.names, self._metric, self._gradients(engine))
            self._curved = [self._square_curved(engine, *pair) for pair in self._pairs(self._dense)]
        run.has_moments = self._metric.exists
        self._length: StepLength | None = None
        if run.has_moments:
            recipe = training.plan.recipe.training
            batch = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
            length = StepLength(self._dense, self._metric, min(EXAMPLES, recipe.per_device_train_batch_size) / batch)
            self._length = length if length.is_known else None
        self.shares = [] if self._length is None else self._length.shares_of_dense()
        self._between = [square_between(*pair, self._metric, run.part_of) for pair in self._pairs(self._dense)]
        self._norms = [square_gradient(each, self._metric, run.part_of) for each in self._dense]
        least = ROUNDING * min(_total(norm, "plain") for norm in self._norms)
        if min(_total(between, "plain") for between in self._between) <= least:
            raise DataError(
                "the noise between batches cannot be measured, because two batches have the same gradient; the "
                f"training set has {len(training.order.examples)} examples"
            )

    def measure(self, candidate: Candidate, *, is_last: bool) -> None:
        """Add a policy's gradients at this point, and at the last point the cost of its steps. Raise ``SparseBPError``
        if the policy does not support the model."""
        with self._run.attached(candidate.policies) as engine:
            if engine.extensions or not candidate.is_exact:
                errors, fixed = self._measure_engine(candidate, engine)
                if is_last:
                    self._count_run(candidate, engine)
            else:  # exact policies that decide at sites only are dense
                errors = [BatchError(Squares(), Squares(), 0.0, {}) for _ in self._measured]
                fixed = self._run.update_flops
                candidate.trials.append(0.0)
                candidate.passes += zip(self.whole_flops, self.whole_flops, strict=True)
                candidate.steps += zip(self.whole_flops, self.whole_flops, strict=True)
        candidate.fixed.append(fixed)
        metrics = ("plain", "adam") if self._curvature is None else ("plain", "adam", "curved")
        for name in metrics:
            pairs = [self._pair(name, number, error) for number, error in enumerate(errors)]
            candidate.pairs[name].append(pairs)
        if self._length is not None:
            plain = candidate.pairs["plain"][-1]
            over_both = sum(pair.mean for pair in plain) / sum(pair.first for pair in plain)  # as in estimate_share
            share = self._length.share_with([error.entries for error in errors], over_both)
            candidate.lengths.append((share, self.shares))
        self._add_parts(candidate, errors)

    def _measure_engine(self, candidate: Candidate, engine: Engine) -> tuple[list[BatchError], float]:
        """Return the errors on all batches, and the FLOPs of update and trial passes."""
        trials = self._run_trials(engine)
        first = self._go_where_it_acts(candidate, engine)
        errors = [self._measure_batch(candidate, engine, 0, first)]
        errors += [self._measure_batch(candidate, engine, index) for index in self._measured[1:]]
        updates = []
        for number, dense in zip(self._numbers, self.whole_flops, strict=False):
            with self._run.trial(engine, number) as trial:
                work = count_work(trial, "policy", dense)
            candidate.passes.append((work.flops, dense))
            updates.append(self._run.per_entry * work.updated)
        candidate.trials.append(trials)
        return errors, fmean(updates) + trials

    def _count_run(self, candidate: Candidate, engine: Engine) -> None:
        """Count micro-batches spread over the whole training, each with its own draws, until their mean cost is known.
        A policy may have a schedule, and its cost may depend on the batch."""
        run, recipe = self._run, self._run.training.plan.recipe.training
        accumulation = recipe.gradient_accumulation_steps
        for place, number in enumerate(spread(recipe.max_steps * accumulation)):
            if place == 1 and engine.states:  # the first step has no earlier ones
                run.show_steps(engine, run.step, SHOWN)
            dense = run.count_dense(engine, number)
            go_to(engine, *divmod(number, accumulation))
            with run.trial(engine, number) as trial:
                work = count_work(trial, "policy", dense)
            update = run.per_entry * work.updated
            candidate.steps.append((work.flops * accumulation + update, dense * accumulation + run.update_flops))
            if is_known(candidate.steps):
                break

    def _measure_batch(
        self, candidate: Candidate, engine: Engine, index: int, first: BatchDraw | None = None
    ) -> BatchError:
        dense = self._dense[index]
        with self._run.trial(engine, self._numbers[index], EXAMPLES) as trial:
            first = first or self._draw(engine, trial, self._draws[index])
            other = first
            if first.is_random and not candidate.is_exact:
                other = self._draw(engine, trial, self._draws[index] + 1)
        draws = first.gradients, other.gradients
        noise, bias = square_errors(dense, draws, self._metric, self._run.part_of)
        is_noisy = _total(noise, "plain") > ROUNDING * _square(dense)
        curved = self._square_curved(engine, *draws) if is_noisy else 0.0
        entries = square_halves(*draws) if is_noisy and self._length is not None else {}
        return BatchError(noise, bias, curved, entries)

    def _square_curved(self, engine: Engine, one: Gradients, other: Gradients) -> float:
        """Return half of the curvature-weighted square of a difference, like the other squares."""
        if self._curvature is None:
            return 0.0
        difference = {name: minus(one[name], other[name]) for name in one}
        return self._curvature.square(difference, lambda: self._gradients(engine)) / 2

    def _gradients(self, engine: Engine) -> Gradients:
        """Return the dense gradients of examples after the measured ones. The loss of the same examples would be curved
        most along their own gradients."""
        size = self._run.training.plan.recipe.training.per_device_train_batch_size
        total = dict[str, Tensor | None]()
        for number in range(self._numbers.stop, self._numbers.stop + -(-CURVED // size)):
            with self._run.trial(engine, number, CURVED, trims=True) as trial:
                for name, gradient in trial.run("dense").gradients.items():
                    before = total.get(name)
                    total[name] = gradient if before is None else before if gradient is None else before + gradient
        return total

    def _run_trials(self, engine: Engine) -> float:
        """Run the trial passes before this step, or before the next step that has some, so that states are realistic.
        Return their FLOPs over the steps between them."""
        steps = min(AHEAD, self._run.training.plan.recipe.training.max_steps)
        due = [ahead for ahead in range(steps) if engine.trials_are_due(ahead)]
        if not due:
            return 0.0
        go_to(engine, self._run.step + due[0])
        with count_flops() as flops:
            self._run.run_trials(engine, self._numbers[0])
        return float(flops.total) * len(due) / steps

    def _go_where_it_acts(self, candidate: Candidate, engine: Engine) -> BatchDraw:
        """Move a policy with its own schedule to a step at which it leaves something out, if there is one. Return its
        first draw there on the first batch. Only the first point searches for the step."""
        if candidate.step is not None and candidate.step > self._run.step:
            go_to(engine, candidate.step)
            return self._draw_first(engine)
        first = self._draw_first(engine)
        if candidate.is_exact or candidate.fixed or self._acts(first):
            return first
        num_steps = self._run.training.plan.recipe.training.max_steps
        for step in (round(share * num_steps) + more for share in LATER for more in (0, 1)):
            go_to(engine, step)
            if self._acts(found := self._draw_first(engine)):
                candidate.step = step
                return found
        go_to(engine, self._run.step)
        return first

    def _draw_first(self, engine: Engine) -> BatchDraw:
        with self._run.trial(engine, self._numbers[0], EXAMPLES) as trial:
            return self._draw(engine, trial, self._draws[0])

    def _draw(self, engine: Engine, trial: TrialStep, number: int) -> BatchDraw:
        before = engine.num_draws
        gradients = trial.run("policy", number).gradients
        _refuse_other_shapes(self._dense[0], gradients)
        return BatchDraw(gradients, engine.num_draws != before)

    def _acts(self, draw: BatchDraw) -> bool:
        dense = self._dense[0]
        error = {name: minus(draw.gradients[name], gradient) for name, gradient in dense.items()}
        return _square(error) > ROUNDING * _square(dense)

    def _pairs(self, values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return zip(values[::2], values[1::2], strict=True)

    def _pair(self, metric: str, number: int, error: BatchError) -> BatchPair:
        if metric == "curved":
            return BatchPair(self._curved[number], error.curved, 0.0)
        noise, bias = _total(error.noise, metric), _total(error.bias, metric)
        size = _total(error.noise, "plain") + abs(_total(error.bias, "plain"))
        if size < ROUNDING * _total(self._norms[2 * number], "plain"):
            noise = bias = 0.0
        first, second = (_total(norm, metric) for norm in self._norms[2 * number : 2 * number + 2])
        return BatchPair(_total(self._between[number], metric), noise, bias, first, (first + second) / 2)

    def _add_parts(self, candidate: Candidate, errors: Sequence[BatchError]) -> None:
        metric = "adam" if self._run.has_moments else "plain"
        for part in self._between[0].sums[metric]:
            sums = candidate.by_part.setdefault(part, [0.0, 0.0, 0.0])
            for error in errors:
                sums[0] += error.noise.sums[metric].get(part, 0.0)
                sums[1] += error.bias.sums[metric].get(part, 0.0)
            sums[2] += sum(between.sums[metric][part] for between in self._between)


def _refuse_other_shapes(dense: Gradients, gradients: Gradients) -> None:
    for name, gradient in gradients.items():
        theirs = dense[name]
        if gradient is not None and theirs is not None and gradient.shape != theirs.shape:
            raise SparseBPError(
                f"the policy trains only parts of {name}, so its error relative to the whole gradient cannot be "
                "measured"
            )


def _total(squares: Squares, metric: str) -> float:
    return sum(squares.sums[metric].values())


def _square(gradients: Mapping[str, Tensor | None]) -> float:
    return sum(inner(g.float(), g.float()) for g in gradients.values() if g is not None)
