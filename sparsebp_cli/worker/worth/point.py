"""Pairs of batches at the weights of one step of the dense training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward import Engine, count_flops
from sparsebp_cli.errors import DataError, SparseBPError
from sparsebp_cli.plan.exchange import BatchPair
from sparsebp_cli.policy import make_policy
from sparsebp_cli.worker.probe import count_pass
from sparsebp_cli.worker.trial_step import Mode
from sparsebp_cli.worker.worth.candidate import Candidate
from sparsebp_cli.worker.worth.curvature import Curvature
from sparsebp_cli.worker.worth.dense_run import DenseRun
from sparsebp_cli.worker.worth.squares import Gradients, Metric, Squares, minus, square_between, square_errors
from sparsebp_cli.worker.worth.step_length import StepLength, add_up, square_halves

WHOLE = 2  # whole batches at a point on which exact policies are counted
COUNTED = 2  # small batches at a point on which other policies are counted: counting takes as long as three passes
EXAMPLES = 4  # of each: an error and the variance between batches both go as one over their size
CURVED = 8  # examples whose loss has the curvature, the same for all errors and for the batches
AHEAD = 100  # steps over which trial passes are averaged
LATER = (0.6, 0.95)  # shares of a training at which a policy that leaves nothing out at a point may do so
ROUNDING = 1e-8  # of an error's square over the gradient's: below it a policy computes the dense gradient


@dataclass(frozen=True)
class BatchError:
    """Squares of a policy's error on one batch."""

    noise: Squares
    bias: Squares
    curved: float  # the noise with the loss's curvature between, on the first batch of a pair; else 0
    entries: Mapping[str, Tensor]  # squares of the noise, by parameter; where the optimizer has moments


class Point:
    """Some pairs of batches at the weights of one step, with their dense gradients."""

    def __init__(self, run: DenseRun, step: int, pairs: int) -> None:
        self._run, training = run, run.training
        first = step * training.plan.recipe.training.gradient_accumulation_steps
        self._numbers = range(first, first + 2 * pairs)
        self._dense: list[dict[str, Tensor | None]] = []
        self._flops: list[float] = []  # of a dense pass over each small batch that is counted
        with run.paused():
            engine = run.attach([make_policy("dense")])
            for number in self._numbers:
                run.tell(f"step {step}: dense", 1)
                with run.trial(engine, number, EXAMPLES) as trial:
                    self._dense.append(trial.run("dense").gradients)
                    if len(self._flops) < COUNTED:
                        self._flops.append(count_pass(trial, "dense"))
            self.whole_flops = [self._count_whole(engine, number, "dense") for number in range(WHOLE)]
            self._metric = Metric(training.optimizer.optimizer, run.names)
            self._curvature: Curvature | None = None
            if Curvature.is_measurable(run.names, training.plan.recipe.training.mixed_precision):
                self._curvature = Curvature(run.names, self._metric, self._gradients(engine))
            self._curved = [self._square_curved(engine, *pair) for pair in self._pairs(self._dense)]
            engine.detach()
        run.has_moments = self._metric.exists
        self._length: StepLength | None = None
        if run.has_moments:
            recipe = training.plan.recipe.training
            batch = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
            length = StepLength(self._dense, self._metric, EXAMPLES / batch)
            self._length = length if length.is_known else None
        self.shares = [] if self._length is None else self._length.shares_of_dense()
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
            errors = [self._measure_batch(candidate, engine, index) for index in range(len(self._numbers))]
            updated = self._count_updated
            if candidate.is_exact:
                mine = [self._count_whole(engine, number, "policy") for number in range(WHOLE)]
                candidate.passes += zip(mine, self.whole_flops, strict=True)
        candidate.fixed.append(self._run.per_entry * updated + trials)
        metrics = ("plain", "adam") if self._curvature is None else ("plain", "adam", "curved")
        for name in metrics:
            pairs = [self._pair(name, number, *pair) for number, pair in enumerate(self._pairs(errors))]
            candidate.pairs[name].append(pairs)
        if self._length is not None:
            noise = [add_up(one.entries, other.entries, 0.5) for one, other in self._pairs(errors)]
            candidate.lengths.append((self._length.share_with(noise), self.shares))
        self._add_parts(candidate, errors)

    def _measure_batch(self, candidate: Candidate, engine: Engine, index: int) -> BatchError:
        dense = self._dense[index]
        with self._run.trial(engine, self._numbers[index], EXAMPLES) as trial:
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
        noise, bias = square_errors(dense, (draws[0], draws[1]), self._metric, self._run.part_of)
        is_noisy = _total(noise, "plain") > ROUNDING * _square(dense)
        # On the first batch of each pair alone, since it takes as long as several draws.
        curved = self._square_curved(engine, draws[0], draws[1]) if is_noisy and index % 2 == 0 else 0.0
        entries = square_halves(draws[0], draws[1]) if is_noisy and self._length is not None else {}
        return BatchError(noise, bias, curved, entries)

    def _square_curved(self, engine: Engine, one: Gradients, other: Gradients) -> float:
        """Return half of the square of a difference with the curvature between, as the other squares are taken."""
        if self._curvature is None:
            return 0.0
        difference = {name: minus(one[name], other[name]) for name in one}
        return self._curvature.square(difference, lambda: self._gradients(engine)) / 2

    def _gradients(self, engine: Engine) -> Gradients:
        """Return the dense gradients of examples behind the measured ones: the loss of the same ones would be curved
        along their own gradients most of all."""
        size = self._run.training.plan.recipe.training.per_device_train_batch_size
        total = dict[str, Tensor | None]()
        for number in range(self._numbers.stop, self._numbers.stop + -(-CURVED // size)):
            with self._run.trial(engine, number, CURVED) as trial:
                for name, gradient in trial.run("dense").gradients.items():
                    before = total.get(name)
                    total[name] = gradient if before is None else before if gradient is None else before + gradient
        return total

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
        with self._run.trial(engine, self._numbers[0], EXAMPLES) as trial:
            found, dense = trial.run("policy", 1).gradients, self._dense[0]
        _refuse_other_shapes(dense, found)
        error = {name: minus(found[name], gradient) for name, gradient in dense.items()}
        return _square(error) > ROUNDING * _square(dense)

    def _count_whole(self, engine: Engine, number: int, mode: Mode) -> float:
        with self._run.trial(engine, self._numbers[number]) as trial:
            return count_pass(trial, mode)

    def _pairs(self, values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return zip(values[::2], values[1::2], strict=True)

    def _pair(self, metric: str, number: int, one: BatchError, other: BatchError) -> BatchPair:
        if metric == "curved":
            return BatchPair(self._curved[number], one.curved, 0.0)
        noise = fmean(_total(each.noise, metric) for each in (one, other))
        bias = fmean(_total(each.bias, metric) for each in (one, other))
        norm = fmean(_square(self._dense[2 * number + more]) for more in (0, 1))
        sizes = (_total(each.noise, "plain") + abs(_total(each.bias, "plain")) for each in (one, other))
        if fmean(sizes) < ROUNDING * norm:
            noise = bias = 0.0
        return BatchPair(_total(self._between[number], metric), noise, bias)

    def _add_parts(self, candidate: Candidate, errors: Sequence[BatchError]) -> None:
        metric = "adam" if self._run.has_moments else "plain"
        for part in self._between[0].sums[metric]:
            sums = candidate.by_part.setdefault(part, [0.0, 0.0, 0.0])
            for error in errors:
                sums[0] += error.noise.sums[metric].get(part, 0.0) / 2
                sums[1] += error.bias.sums[metric].get(part, 0.0) / 2
            sums[2] += sum(between.sums[metric][part] for between in self._between)


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
