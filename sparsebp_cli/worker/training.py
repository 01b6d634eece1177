"""The training loop. ``_train_step`` is one optimizer step: forward, backward through the engine, update; all timed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.backward import Engine, count_flops
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.policy import Policy
from sparsebp_cli.recipe.evaluation import list_measured
from sparsebp_cli.recipe.schema import GenerateSection
from sparsebp_cli.run import JournalWriter, RunFolder, metric
from sparsebp_cli.run.journal import SAVED
from sparsebp_cli.worker.adapter import is_adapted, merge
from sparsebp_cli.worker.allowance import Allowance
from sparsebp_cli.worker.batch import BatchOrder, micro_batch_loss
from sparsebp_cli.worker.best import BestEvaluation
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from sparsebp_cli.worker.compiled import describe_graphs
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.evaluate import (
    TEST,
    VALIDATION,
    ExampleLosses,
    HeldOutSplit,
    evaluate,
    evaluation_batches,
)
from sparsebp_cli.worker.finite_check import check_loss, check_norm, check_result, check_state, check_summed
from sparsebp_cli.worker.generation import Generator, measure_generated
from sparsebp_cli.worker.measurement import Measurement
from sparsebp_cli.worker.optimizer import clip_gradient
from sparsebp_cli.worker.peak_memory import PeakMemory, StepPeak
from sparsebp_cli.worker.prefetch import BatchPrefetch
from sparsebp_cli.worker.price import Shape, StepPrice, find_updated, join_shapes, shape_of
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.prompt import HeldOutPrompts
from sparsebp_cli.worker.reference import Reference
from sparsebp_cli.worker.reload import ReloadedOutputs
from sparsebp_cli.worker.sgd_noise import halve
from sparsebp_cli.worker.sharding import copy_full, full_tensor, gather, no_gradient_sync, unwrap
from sparsebp_cli.worker.snapshot import Restorable, restore, take_snapshot
from sparsebp_cli.worker.step_cost import RelativeCost
from sparsebp_cli.worker.step_kind import StepKind, describe_pass
from sparsebp_cli.worker.step_metrics import (
    kept_share,
    memory_metrics,
    route_metrics,
    selection_metrics,
)
from sparsebp_cli.worker.stopwatch import Stopwatch, read_load
from sparsebp_cli.worker.trial_step import RestOfUpdate, limit_measurements, trainable_parameters

Batch = dict[str, Tensor]
PRICED_BATCHES = 1_000  # only their shapes are read


@dataclass
class Training(Restorable):
    """A run in progress. Losses, tokens and their rate are over all ranks; seconds and bytes are of the rank with the
    largest value; the probe measures the first rank."""

    plan: Plan
    run: RunFolder
    journal: JournalWriter
    stop: StopRequest
    accelerator: Accelerator
    model: nn.Module  # prepared by accelerate, with the engine attached
    policies: Sequence[Policy]
    engine: Engine
    reference: Reference  # what policies compare with
    optimizer: AcceleratedOptimizer
    schedule: LRScheduler
    order: BatchOrder
    held_out: list[EncodedExample]  # validation examples
    test: list[EncodedExample]  # may be empty
    prompts: HeldOutPrompts  # for a recipe that measures generated texts
    checkpoints: CheckpointFolder
    tokenizer: PreTrainedTokenizerBase
    seal: Seal  # the config fingerprint that its checkpoints record
    ranks: Ranks = field(default_factory=Ranks)
    best: BestEvaluation = field(default_factory=BestEvaluation)
    compiled: nn.Module | None = None  # the compiled model for training steps; None: not compiled
    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens seen in training, over all ranks
    bare: nn.Module = field(init=False)  # the model inside DDP's wrapper
    batches: BatchPrefetch = field(init=False)
    allowance: Allowance = field(init=False)
    price: StepPrice = field(init=False)
    measurement: Measurement = field(init=False)
    step_peak: StepPeak = field(init=False)
    generator: Generator | None = field(init=False, default=None)
    _told_graphs: bool = False

    def __post_init__(self) -> None:
        self.bare = unwrap(self.model)
        training = self.plan.recipe.training
        num_batches = training.max_steps * training.gradient_accumulation_steps
        self.batches = BatchPrefetch(self.order, self.accelerator.device, num_batches)
        self.allowance, self.price = Allowance(training.max_flops), StepPrice()
        self.measurement = Measurement(
            limit_measurements(self.plan.recipe, self.ranks, self.engine),
            self.journal,
            self.bare,
            self.engine,
            self.accelerator.backward,
            self.accelerator.device,
            PeakMemory(self.accelerator.device),
            self.price,
            self.ranks,
            self._rest_of_update,
        )
        if self.allowance.limits_work and self.measurement.recipe.measure.probe_every is None:
            raise UnsupportedError("this run cannot count FLOPs by probes, which max_flops needs: use max_steps")
        if self.plan.recipe.checkpoint.keep_best is not None and self._trains_frozen():
            text = "checkpoint.keep_best does not work with policies that train parts of frozen weights: leave it out"
            raise UnsupportedError(text)
        if self.plan.recipe.measure.generate is not None:
            self.generator = self._make_generator(self.plan.recipe.measure.generate)
        self.step_peak = StepPeak(
            self.measurement.recipe,
            self.bare,
            self.engine,
            self.optimizer,
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
        last = snapshot.step if snapshot is not None else 0
        best = plan.recipe.checkpoint.keep_best
        patience, watched = plan.recipe.training.early_stopping_patience, list_measured(plan.recipe)
        training.best = BestEvaluation.find(watched[best] if best else None, run.path, last, patience)
        return training

    @property
    def is_done(self) -> bool:
        """Whether all steps of the recipe are done, or the run ends before them."""
        return self.step == self.plan.recipe.training.max_steps or bool(self.allowance.exceeded or self.best.end_reason)

    @property
    def is_paused(self) -> bool:
        """Whether the run must stop here, to be resumed later."""
        stop_at = self.plan.recipe.checkpoint.stop_at
        return stop_at is not None and self.step >= stop_at and not self.is_done

    @property
    def end_reason(self) -> str:
        """Why the run ended before its last step; empty if it did not."""
        early = self.allowance.exceeded or self.best.end_reason
        return early if self.step < self.plan.recipe.training.max_steps else ""

    def run_to_end(self) -> None:
        """Train until ``max_steps``, a limit or a stop request, then save the model or a checkpoint."""
        recipe = self.plan.recipe
        if self.step == 0:
            self._log(self._evaluate() | self._generate())
        while not self.is_done and not self.is_paused and not self._is_stop_requested():
            if self.step == 0:
                self._log(self.measurement.at_start(*self._coming(), self.policies))
                if self.allowance.limits_work:
                    self.journal.write("facts", values={"dense_step_flops": self._price_dense()})
            self._log(self._measure(), step=self.step + 1)
            values = self.step_peak.watch(self.step + 1, self._train_step)
            self.allowance.spend(values[metric.STEP_FLOPS.name])
            self._tell_graphs()
            self.step += 1
            self.measurement.note()
            self._log(values)
            evaluation, is_best = self._evaluate_step()
            self._log(evaluation)
            if is_best or self.step % recipe.checkpoint.every == 0:
                self._save_checkpoint()
            if self.is_done:
                check_result(evaluation[metric.EVAL_LOSS.name], self.step)
        if self.is_done:
            if self.end_reason:
                text = f"{self.end_reason}{self._describe_uncharged()}; the run ends after step {self.step}"
                self.journal.write("note", level="info", text=text)
            self._require_finite()
            self._save_model()
        elif self.step > 0 and self.ranks.broadcast(self.step not in self.checkpoints.steps()):
            # The first rank decides by its view of the folder, so that all ranks save or none does.
            self._save_checkpoint()

    def _evaluate_step(self) -> tuple[dict[str, float], bool]:
        """Make the evaluations that are due after a step, and return whether they are the best so far."""
        was_done = self.is_done
        due = was_done or self.step % self.plan.recipe.measure.eval_every == 0
        values = (self._evaluate() if due else {}) | self._generate()
        is_best = self.best.take(self.step, values)
        if self.is_done and not was_done:  # ended by its patience: measure as at the last step
            values = self._evaluate() | self._generate()
        return values, is_best

    def _describe_uncharged(self) -> str:
        """Describe what a work limit does not count: the comparisons of a policy that verifies its results."""
        number, last = sum(part.uncharged_comparisons for part in self.engine.extensions), self.price.counted
        if not number or last is None or not self.allowance.limits_work:
            return ""
        cost = number * (1.0 + last.policy / last.dense)
        return f" (not counted: {number} comparisons with the ordinary step, which cost about {cost:.3g} dense steps)"

    @property
    def _first_batch(self) -> int:
        """The number of the next step's first micro-batch."""
        return self.step * self.plan.recipe.training.gradient_accumulation_steps

    def _tell_graphs(self) -> None:
        """Note after the first step of an attempt how the model was compiled."""
        if self.compiled is not None and not self._told_graphs:
            self._told_graphs = True
            self.journal.write("note", level="info", text=describe_graphs())

    def _is_stop_requested(self) -> bool:
        """Return whether any rank received a stop signal, so that all ranks stop after the same step."""
        number = int(self.ranks.all_max([self.stop.signal or 0])[0])
        self.stop.signal = signal.Signals(number) if number else None
        return self.stop.signal is not None

    def _train_step(self) -> dict[str, float | None]:
        training, watch = self.plan.recipe.training, Stopwatch(self.accelerator.device)
        accumulation = training.gradient_accumulation_steps
        first = self._first_batch
        shares = self.batches.take(range(first, first + accumulation))
        targets, losses = sum(count for _, count in shares), list[Tensor]()
        passes, sizes = list[tuple[float, ...]](), self._trained_sizes
        probing = self._run_trials(first, shares[0][0], targets)
        self.engine.expect([batch for batch, _ in shares])
        counting = self._count_update()
        for number, (batch, _) in enumerate(shares, 1):
            is_last = number == accumulation
            with self._accumulating(is_last=is_last):
                with watch("forward"):
                    loss = self.loss_of(batch, targets, self.compiled)
                losses.append(loss.detach())
                if not self._checks_late:
                    self._check_losses([float(losses[-1])])
                with watch("backward"):
                    self.engine.backward(loss, self.accelerator.backward, is_last=is_last)
                passes.append(describe_pass(self.engine, sizes))
        with watch("optimizer"), counting or nullcontext():
            updated, which = find_updated(self.optimizer, all_of_them=self.engine.eager is not None)
            norm_before = self.clip()
            self.batches.prepare(range(first + accumulation, first + 2 * accumulation))  # before the host waits
            loss_sum, norm = self._check(losses, norm_before)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.price.see(which, self.step + 1, counting.flops / updated if counting is not None and updated else None)
        kept, chosen = self.engine.take_kept_share(), self.engine.take_chosen()
        price = self.price.price(
            self.step + 1,
            StepKind.of(passes, kept, chosen),
            [shape_of(batch) for batch, _ in shares],
            updated,
            sum(sizes.values()),
            probing or 0.0,
        )
        tokens = sum(batch["input_ids"].numel() for batch, _ in shares) * self.ranks.count
        self.tokens += tokens
        most = self._max_over_ranks(watch.read() | memory_metrics(self.bare, self.optimizer, self.measurement.peak))
        return {
            metric.TRAIN_LOSS.name: loss_sum,
            metric.GRAD_NORM.name: norm,
            metric.LEARNING_RATE.name: float(self.schedule.get_last_lr()[0]),
            metric.TRAIN_TOKENS.name: self.tokens,
            metric.PROBING_FLOPS.name: probing,
            **self._sum_over_ranks(price),
            metric.KEPT_SHARE.name: kept_share(kept, self.ranks),
            metric.FORWARD_SECONDS.name: most.pop("forward"),
            metric.BACKWARD_SECONDS.name: most.pop("backward"),
            metric.OPTIMIZER_SECONDS.name: most.pop("optimizer"),
            metric.TOKENS_PER_SECOND.name: tokens / most["step"],
            metric.STEP_SECONDS.name: most.pop("step"),
            metric.STEP_CPU_SECONDS.name: most.pop("step_cpu"),
            metric.LOAD.name: read_load(),
            **most,
            **route_metrics(self.engine.take_route()),
            **selection_metrics(chosen, self.ranks, self.policies),
        }

    def _count_update(self) -> UpdateFlops | None:
        """Return the counter for this step's update, at the first two steps (a momentum begins with the
        second), else None. They are in warm-up, because counting slows an update down."""
        if self.price.counted is None or (self.step > 1 and self.price.per_entry):
            return None
        counting = UpdateFlops()
        if self.engine.eager is not None:
            self.engine.eager.counting = counting
        return counting

    def _price_dense(self) -> float | None:
        """Return the mean FLOPs of a dense step, without the update, over the first thousand micro-batches."""
        if self.price.counted is None:
            return None
        scales = [self.price.counted.scale(shape_of(self.order.rank_part(n)[0])) for n in range(PRICED_BATCHES)]
        accumulation = self.plan.recipe.training.gradient_accumulation_steps
        return fmean(scales) * self.price.counted.dense * accumulation * self.ranks.count

    @cached_property
    def _trained_sizes(self) -> dict[str, int]:
        """The number of entries of each parameter that dense trains, by name, in the model's order."""
        return {name: p.numel() for name, p in trainable_parameters(self.bare, self.engine).items()}

    def _run_trials(self, number: int, batch: Batch, targets: int) -> float | None:
        """Make the trial passes that a policy requests before this step; return their FLOPs, None without any."""
        if not self.engine.trials_are_due():
            return None
        with count_flops() as flops:
            others = [
                partial(self._trial_loss, number + more, targets)
                for more in range(1, self.engine.count_trial_batches())
            ]
            first = partial(self.loss_of, batch, targets)
            self.engine.run_trials(first, self.accelerator.backward, others=others)
        return float(flops.total)

    def _trial_loss(self, number: int, targets: int) -> Tensor:
        """Return the loss of a later micro-batch, over the number of targets of the next step."""
        return self.loss_of(self.order.rank_part(number)[0], targets)

    def _accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over the ranks only in the last micro-batch of a step."""
        return nullcontext() if is_last or self.ranks.count == 1 else no_gradient_sync(self.model)

    def _sum_over_ranks(self, price: dict[str, float | None]) -> dict[str, float | None]:
        """Return the cost of a step over all processes, so that all processes end at the same step."""
        known = {name: value for name, value in price.items() if value is not None}
        return price | dict(zip(known, self.ranks.all_sum(list(known.values())), strict=True))

    def _max_over_ranks(self, values: dict[str, float]) -> dict[str, float]:
        return dict(zip(values, self.ranks.all_max(list(values.values())), strict=True))

    def _loss(self, number: int) -> Tensor:
        """Return the loss of a micro-batch as if it were a whole step."""
        return self.loss_of(*self.order.rank_part(number))

    def loss_of(self, batch: Batch, targets: int, compiled: nn.Module | None = None) -> Tensor:
        """Return the loss of a micro-batch of a step with ``targets`` targets.

        Only training steps run ``compiled``: dynamo never recompiles what it has met under a counter.
        """
        model = self.model if compiled is None else compiled
        return micro_batch_loss(model, batch, targets, self.accelerator.device, self.order.candidates)

    def _plain_loss(self, batch: Batch, targets: int) -> Tensor:
        """Return the loss over all targets. Without the engine nothing masks targets that are not candidates."""
        return micro_batch_loss(self.model, batch, targets, self.accelerator.device)

    @property
    def _checks_late(self) -> bool:
        """Whether losses are read together with the gradient's norm, before the update, so that the host does not wait
        for a GPU between forward and backward. Not with an eager update, which changes weights in the backward."""
        return self.accelerator.device.type == "cuda" and self.engine.eager is None

    def _check_losses(self, losses: list[float]) -> float:
        """Return the sum of losses over all ranks. Each must be finite."""
        return sum(check_loss(loss, self.step + 1) for loss in self.ranks.all_sum(losses))

    def _check(self, losses: list[Tensor], norm: Tensor | float) -> tuple[float, float]:
        """Return the loss of the step over all ranks and the gradient's norm, read in one copy. Both must be finite."""
        values = torch.stack([value.double() for value in (*losses, torch.as_tensor(norm, device=losses[0].device))])
        *read, last = values.cpu().tolist()
        *sums, norms = self.ranks.all_sum([*read, last])
        total = sum(check_loss(loss, self.step + 1) for loss in sums)
        check_norm(last, self.bare, self.step + 1)
        check_summed(last, norms / self.ranks.count, self.step + 1)
        return total, last

    def clip(self) -> Tensor | float:
        """Clip the gradient, and return its norm before clipping."""
        if self.engine.eager is not None:  # the eager update has already clipped, checked and applied every gradient
            return self.engine.eager.gradient_norm
        return full_tensor(clip_gradient(self.plan.recipe.training, self.optimizer))

    def measure_cost(self) -> RelativeCost:
        """Measure what a step costs beside a dense step, without training."""
        return self.measurement.measure_cost(*self._coming(), self.policies)

    def _coming(self) -> tuple[Callable[[], Tensor], Callable[[], Shape]]:
        """Return functions that compute the loss of the next step's first micro-batch, and the shape of a trial's
        input: that micro-batch, or all that a policy runs together."""
        number = self._first_batch

        def shape() -> Shape:
            batches = self._rest_of_update().batches or [self.order.rank_part(number)[0]]
            return join_shapes([shape_of(batch) for batch in batches])

        return lambda: self._loss(number), shape

    def _rest_of_update(self) -> RestOfUpdate:
        """Return the micro-batches that a measurement of the next step runs together, if a policy shares their rows."""
        count = self.order.sorted_batches
        if count == 1:
            return RestOfUpdate()
        numbers = range(self._first_batch, self._first_batch + count)
        batches = [self.order.rank_part(number)[0] for number in numbers]
        return RestOfUpdate(batches, [partial(self._loss, number) for number in numbers[1:]])

    def _measure(self) -> dict[str, float | None]:
        """Take the measurements that are due on the next step's first micro-batch."""
        number = self._first_batch
        halves = (lambda: halve(self.order[number], self._plain_loss)) if self.ranks.count == 1 else None
        return self.measurement.before(self.step + 1, *self._coming(), halves)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on validation, and after the last step also on the test split."""
        recipe = self.plan.recipe
        values = self._evaluate_on(self.held_out[: recipe.measure.eval_examples], VALIDATION)
        tests = self.is_done and self.test and recipe.measure.test
        return values | (self._evaluate_on(self.test, TEST) if tests else {})

    def _evaluate_on(self, examples: Sequence[EncodedExample], split: HeldOutSplit) -> dict[str, float]:
        batches = evaluation_batches(self.plan.recipe, examples, self.order.pad_token_id, self.ranks.count)
        losses = ExampleLosses() if self.is_done else None
        with self.engine.scoring():  # in a forward with labels, nothing else reads the logits
            values = evaluate(self.model, batches, self.accelerator.device, losses, self.ranks, split)
        if losses is not None and losses.loss:
            documents = [example.document for example in examples[: len(losses.loss)]]
            content = vars(losses) | {"documents": documents}
            self.journal.write("examples", step=self.step, split=split.name, values=content)
        return values

    def _make_generator(self, section: GenerateSection) -> Generator:
        recipe = self.plan.recipe
        size = recipe.measure.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
        found = Generator(self.bare, self.tokenizer, section, size, self.accelerator.device)
        found.check([*self.prompts.validation, *self.prompts.test])
        return found

    def _generate(self) -> dict[str, float]:
        """Generate from the prompts that are due at this step, and return the metrics of their texts."""
        if (generator := self.generator) is None:
            return {}
        every, values = generator.section.every, dict[str, float]()
        due = [(VALIDATION, self.prompts.validation), (TEST, self.prompts.test if self.is_done else ())]
        if self.step and not self.is_done and (every is None or self.step % every):
            return {}
        for split, prompts in due:
            if prompts:
                with self.engine.disabled():
                    precision = self.accelerator.autocast()
                    made = measure_generated(generator, prompts, split.prefix, self.ranks, precision, each=self.is_done)
                values |= made.values
                if made.scores:
                    self.journal.write("scores", step=self.step, values=made.scores)
                self.journal.write("samples", step=self.step, split=split.name, values=made.samples)
        return values

    def _log(self, values: Mapping[str, float | None], step: int | None = None) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return
        self.journal.write("metrics", step=self.step if step is None else step, values=known)

    def _require_finite(self) -> None:
        check_state(trainable_parameters(self.bare, self.engine), self.optimizer, self.step, self.ranks)

    def _save_checkpoint(self) -> None:
        self._require_finite()
        self.journal.flush()  # sync the metrics first: a run resumed from this checkpoint does not repeat them
        snapshot = take_snapshot(self)
        if self.ranks.is_first:
            self.checkpoints.best = self.best.step
            self.checkpoints.save(snapshot)

    def _save_model(self) -> None:
        self.journal.flush()
        trains_frozen = self._trains_frozen()
        self.engine.detach()
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        outputs = self._find_outputs(model)
        if trains_frozen and is_adapted(model):
            model = merge(model)  # otherwise the adapters alone would lack the trained parts of the weights under them
        self._write_model(model, "model", outputs, keeps=self.best.step is not None)
        if self.best.step is not None:
            self._save_best(model, self.best.step)

    def _trains_frozen(self) -> bool:
        return any(part.trains_frozen for part in self.engine.extensions)

    def _save_best(self, model: nn.Module, step: int) -> None:
        """Save the model with the weights of the best evaluation, in place of the last weights."""
        damage = self.ranks.broadcast(self.checkpoints.find_damage(step) if self.ranks.is_first else "")
        if damage:
            text = f"best/ is not saved: the checkpoint of step {step} is damaged ({damage})"
            self.journal.write("note", level="warning", text=text)
            return
        own = self.bare.state_dict(keep_vars=True)
        for name, tensor in self.checkpoints.load(step).weights.items():
            copy_full(own[name], tensor)
        self._write_model(model, "best", self._find_outputs(model), keeps=False)
        text = f"best/ has the weights of step {step}, with the best {self.plan.recipe.checkpoint.keep_best}: "
        text += f"{self.best.value:.6g}"
        self.journal.write("note", level="info", text=text)

    def _find_outputs(self, model: nn.Module) -> ReloadedOutputs:
        """Return the model's outputs for the first held-out examples."""
        batch = next(evaluation_batches(self.plan.recipe, self.held_out[:2], self.order.pad_token_id))
        return replace(ReloadedOutputs.of(model, batch), questions=self.prompts.find_asked())

    def _write_model(self, model: nn.Module, name: str, outputs: ReloadedOutputs, *, keeps: bool) -> None:
        """Save the model unchanged to a folder of the run. Collective if it is sharded."""
        from sparsebp_cli.worker.build import rebuild, save_model

        weights = gather(model.state_dict(keep_vars=True), keep=self.ranks.is_first) if self.ranks.is_sharded else None
        if not self.ranks.is_first:
            return
        if weights is not None and is_adapted(model):  # peft merges only whole tensors
            model, weights = rebuild(model, self.plan.recipe, self.tokenizer, weights), None
        device = self.accelerator.device
        record = save_model(model, self.tokenizer, self.run, weights, name, keeps=keeps, outputs=outputs, device=device)
        if reason := record.get("reason"):
            text = f"{name}/ was not compared with the trained model: {reason}"
            self.journal.write("note", level="warning", text=text)
        if asked := record.get("asked"):
            self.journal.write("samples", step=self.step, split=SAVED, values=asked)
        if reason := record.get("unasked"):
            self.journal.write("note", level="warning", text=f"{name}/ was not tried on a prompt: {reason}")
