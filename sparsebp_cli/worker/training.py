"""The loop. One optimizer step is on one screen: forward, backward through the engine, update, each timed apart."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sparsebp_cli.backward import Engine
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.plan.worth import Worth
from sparsebp_cli.run import JournalWriter, RunFolder, metric
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from sparsebp_cli.worker.chosen import tell_chosen
from sparsebp_cli.worker.data import Example
from sparsebp_cli.worker.evaluate import (
    TEST,
    VALIDATION,
    ExampleLosses,
    Split,
    evaluate,
    evaluation_batches,
    select_examples,
)
from sparsebp_cli.worker.figure import held_bytes, kept_share, tell_route
from sparsebp_cli.worker.finite import finite_loss, finite_norm, finite_result, finite_state
from sparsebp_cli.worker.independent import IndependentBatches
from sparsebp_cli.worker.loss import part_of_mean
from sparsebp_cli.worker.measurement import Measurement
from sparsebp_cli.worker.memory import StepMemory
from sparsebp_cli.worker.peak import PeakMemory
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import apart, gather, unwrap, whole
from sparsebp_cli.worker.snapshot import restore, take_snapshot
from sparsebp_cli.worker.stop import StopRequest
from sparsebp_cli.worker.stopwatch import Stopwatch, read_load
from sparsebp_cli.worker.trainable import measurable, trainable_parameters

Batch = dict[str, Tensor]


@dataclass
class Training:
    """A run under way.

    Args:
        plan: What is carried out.
        run: Where its files are.
        journal: Where its numbers go.
        stop: Asked at every step boundary.
        accelerator: Places tensors, casts, differentiates.
        model: Prepared, with the engine attached.
        engine: Carries the policies out.
        optimizer: Prepared.
        schedule: Of the learning rate.
        order: Training micro-batches.
        held_out: Evaluation examples, for validation during training.
        test: Evaluation examples that are read once, after the last step; may be empty.
        checkpoints: Of this run.
        tokenizer: Saved beside the trained model.
        seal: What its checkpoints are made under.
        ranks: This process among those that train together. Losses, tokens and their rate are those of all together,
            seconds and bytes of the rank that has most; the probe's work is the first rank's.
        step: Optimizer steps done.
        tokens: Tokens seen in training.
    """

    plan: Plan
    run: RunFolder
    journal: JournalWriter
    stop: StopRequest
    accelerator: Accelerator
    model: nn.Module
    engine: Engine
    optimizer: Any
    schedule: LRScheduler
    order: BatchOrder
    held_out: list[Example]
    test: list[Example]
    checkpoints: CheckpointFolder
    tokenizer: Any
    seal: Seal
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    tokens: int = 0
    bare: nn.Module = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)
    measurement: Measurement = field(init=False)
    memory: StepMemory = field(init=False)

    def __post_init__(self) -> None:
        self.bare = unwrap(self.model)
        self.parameters = list(trainable_parameters(self.bare, self.engine).values())
        self.measurement = Measurement(
            measurable(self.plan.recipe, self.ranks, self.engine),
            self.journal,
            self.bare,
            self.engine,
            self.accelerator.backward,
            self.accelerator.device,
            PeakMemory(self.accelerator.device),
        )
        self.memory = StepMemory(
            self.measurement.recipe,
            self.journal,
            self.bare,
            self.engine,
            self.optimizer,
            self.accelerator.device,
            self.measurement.peak,
            self.ranks.is_first,
        )

    @classmethod
    def build(
        cls, plan: Plan, run: RunFolder, journal: JournalWriter, stop: StopRequest, ranks: Ranks | None = None
    ) -> Self:
        """Build everything that a plan names; see :mod:`sparsebp_cli.worker.build`."""
        from sparsebp_cli.worker.build import build_training

        parts, snapshot = build_training(plan, run, journal, stop, ranks or Ranks())
        training = cls(**parts)
        if snapshot is not None:
            restore(training, snapshot)
        return training

    @property
    def is_done(self) -> bool:
        """Whether all steps of the recipe were made."""
        return self.step == self.plan.recipe.training.max_steps

    def run_to_end(self) -> None:
        """Train from the last good checkpoint, or from the start, until ``max_steps`` or a request to stop."""
        recipe = self.plan.recipe
        if self.step == 0:
            self._log(self._evaluate())
            self._log(self.measurement.at_start(*self._first()))
        while self.step < recipe.training.max_steps and not self._is_asked():
            self._log(self._measure(), step=self.step + 1)
            values = self.memory.watch(self.step + 1, self._train_step)
            self.step += 1
            self._log(values | self.measurement.after(self.step))
            if self.is_done or self.step % recipe.measure.eval_every == 0:
                self._log(evaluation := self._evaluate())
            if self.step % recipe.checkpoint.every == 0:
                self._save_checkpoint()
            if self.is_done:
                finite_result(evaluation[metric.EVAL_LOSS.name], self.step)
        if self.is_done:
            self._require_finite()
            self._save_model()
        elif self.step > 0 and self.ranks.hear(self.step not in self.checkpoints.steps()):
            self._save_checkpoint()

    def _is_asked(self) -> bool:
        """Whether any rank was asked to stop: all of them stop after the same step."""
        number = int(self.ranks.highest([self.stop.signal or 0])[0])
        self.stop.signal = signal.Signals(number) if number else None
        return self.stop.signal is not None

    def _train_step(self) -> dict[str, float | None]:
        training, watch = self.plan.recipe.training, Stopwatch(self.accelerator.device, self.memory.begin)
        accumulation = training.gradient_accumulation_steps
        start, cpu_start = watch.now(), watch.cpu_now()
        first = self.step * accumulation
        shares = [self.order.share(number) for number in range(first, first + accumulation)]
        targets, loss_sum = sum(count for _, count in shares), 0.0
        for number, (batch, _) in enumerate(shares, 1):
            with self._adding(is_last=number == accumulation):
                with watch("forward"):
                    loss = self._loss(batch, targets)
                loss_sum += finite_loss(self.ranks.total([float(loss.detach())])[0], self.step + 1)
                with watch("backward"):
                    self.engine.backward(loss, self.accelerator.backward, is_last=number == accumulation)
        with watch("optimizer"):
            norm = self._clip(training.max_grad_norm)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(batch["input_ids"].numel() for batch, _ in shares) * self.ranks.count
        self.tokens += tokens
        whole_step = {"step": watch.now() - start, "step_cpu": watch.cpu_now() - cpu_start}
        most = self._most(watch.seconds | whole_step | held_bytes(self.bare, self.optimizer, self.measurement.peak))
        return {
            metric.TRAIN_LOSS.name: loss_sum,
            metric.GRAD_NORM.name: norm,
            metric.LEARNING_RATE.name: float(self.schedule.get_last_lr()[0]),
            metric.TRAIN_TOKENS.name: self.tokens,
            metric.KEPT_SHARE.name: kept_share(self.engine.take_kept_share(), self.ranks),
            metric.FORWARD_SECONDS.name: most.pop("forward"),
            metric.BACKWARD_SECONDS.name: most.pop("backward"),
            metric.OPTIMIZER_SECONDS.name: most.pop("optimizer"),
            metric.TOKENS_PER_SECOND.name: tokens / most["step"],
            metric.STEP_SECONDS.name: most.pop("step"),
            metric.STEP_CPU_SECONDS.name: most.pop("step_cpu"),
            metric.LOAD.name: read_load(),
            **most,
            **tell_route(self.engine.take_route()),
            **tell_chosen(self.engine.take_chosen(), self.ranks, self.plan.recipe),
        }

    def _adding(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients of a step's micro-batches are added up on each rank, and over the ranks once."""
        return nullcontext() if is_last or self.ranks.count == 1 else apart(self.model)

    def _most(self, values: dict[str, float]) -> dict[str, float]:
        return dict(zip(values, self.ranks.highest(list(values.values())), strict=True))

    def _loss(self, batch: Batch, targets: int) -> Tensor:
        return part_of_mean(self.model, batch, targets, self.accelerator.device, self.order.candidates)

    def _plain_loss(self, batch: Batch, targets: int) -> Tensor:
        """All targets count: without the engine nobody leaves out those that are no candidates."""
        return part_of_mean(self.model, batch, targets, self.accelerator.device)

    def _clip(self, max_norm: float | None) -> float:
        if self.engine.eager is not None:  # has clipped, updated and looked at every gradient
            return self.engine.eager.gradient_norm
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, math.inf if max_norm is None else max_norm)
        return finite_norm(float(whole(norm)), self.bare, self.step + 1)

    def find_worth(self) -> Worth:
        """Measure what choosing may gain on the first micro-batch, and train nothing."""
        return self.measurement.find_worth(*self._first())

    def _first(self) -> tuple[Callable[[], Tensor], Batch, nn.Module]:
        batch, targets = self.order.share(0)
        on_device = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        return lambda: self._loss(batch, targets), on_device, self.model

    def _measure(self) -> dict[str, float | None]:
        """What is due beside training, on the first micro-batch of the coming step."""
        number = self.step * self.plan.recipe.training.gradient_accumulation_steps
        count = self.measurement.recipe.measure.independent_examples
        others = None if count is None else IndependentBatches(self.order, number, count, self._plain_loss)
        return self.measurement.before(self.step + 1, lambda: self._loss(*self.order.share(number)), others)

    def _evaluate(self) -> dict[str, float]:
        """On validation; after the last step also on the test split."""
        recipe, ranks = self.plan.recipe, self.ranks.count
        values = self._evaluate_on(select_examples(recipe, self.held_out, ranks), VALIDATION)
        return values | (self._evaluate_on(self.test, TEST) if self.is_done and self.test else {})

    def _evaluate_on(self, examples: Sequence[Example], split: Split) -> dict[str, float]:
        batches = evaluation_batches(self.plan.recipe, examples, self.order.pad_token_id, self.ranks.count)
        losses = ExampleLosses() if self.is_done else None
        values = evaluate(self.model, batches, self.accelerator.device, losses, self.ranks, split)
        if losses is not None and losses.loss:
            documents = [example.document for example in examples[: len(losses.loss)]]
            told = vars(losses) | {"documents": documents}
            self.journal.write("examples", step=self.step, split=split.name, values=told)
        return values

    def _log(self, values: Mapping[str, float | None], step: int | None = None) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return
        self.journal.write("metrics", step=self.step if step is None else step, values=known)

    def _require_finite(self) -> None:
        finite_state(trainable_parameters(self.bare, self.engine), self.optimizer, self.step, self.ranks)

    def _save_checkpoint(self) -> None:
        self._require_finite()
        self.journal.flush()  # what was measured up to here is on the disk before a resume can begin after it
        snapshot = take_snapshot(self)
        if self.ranks.is_first:
            self.checkpoints.save(snapshot)

    def _save_model(self) -> None:
        from sparsebp_cli.worker.build import save_model

        self.journal.flush()
        self.engine.detach()
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        weights = gather(model.state_dict(keep_vars=True), keep=self.ranks.is_first) if self.ranks.is_sharded else None
        if self.ranks.is_first:
            save_model(model, self.tokenizer, self.run, weights)
