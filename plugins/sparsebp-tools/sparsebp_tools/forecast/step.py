"""Rehearse one training step on tensors without data: its memory at every moment, and its FLOPs.

The step uses the functions of :mod:`sparsebp_cli.worker.training`, without its measurements. Only one step is made,
with a new optimizer; its state is then moved to the beginning, as in every later step. Trial passes that a policy
requests before the step come first, because they choose what the step trains; later ones come after it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn

from sparsebp_cli.backward import Engine, count_flops
from sparsebp_cli.backward.linear.quantized import count_parameters
from sparsebp_cli.backward.observe.flops import FlopCount
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import Policy, Stateful
from sparsebp_cli.recipe.description import describe_policies
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from sparsebp_cli.worker.batch import BatchOrder, micro_batch_loss
from sparsebp_cli.worker.optimizer import build_optimizer, clip_gradient
from sparsebp_cli.worker.policy import attach_policies, make_policies, set_columns
from sparsebp_cli.worker.probe import SQUARES
from sparsebp_cli.worker.reference import Reference
from sparsebp_tools.forecast.depth import shorten
from sparsebp_tools.forecast.fake import FakeRecord, StandIns, pretend
from sparsebp_tools.forecast.material import Material
from sparsebp_tools.forecast.model import build_by_config
from sparsebp_tools.forecast.record import Parts, StepForecast
from sparsebp_tools.memory.curve import PHASES, MemoryCurve, MemoryPoint
from sparsebp_tools.memory.watch import MemoryWatch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rehearsal:
    """Rehearse steps of recipes that differ in how they are trained, on the same material.

    Args:
        material: Config and examples.
        number: Number of the rehearsed micro-batch.
        gpu: Whether to behave like PyTorch on a GPU.
    """

    material: Material
    number: int
    gpu: bool

    def forecast(self, recipe: Recipe, layers: int | None = None) -> StepForecast:
        """Rehearse a step of a recipe; ``layers`` is the number of layers to build, None: all. Raise what a real
        training would raise."""
        usual, comparing = set_comparisons(recipe, "never"), set_comparisons(recipe, "always")
        step = self._forecast(usual, layers)
        if usual == recipe:
            return step
        return step.model_copy(update={"comparison": self._forecast(comparing, layers).peak})

    def _forecast(self, recipe: Recipe, layers: int | None) -> StepForecast:
        with pretend(gpu=self.gpu) as stand_ins:
            parts = self._build(recipe, layers, stand_ins)
            try:
                return _run(recipe, parts, self._examples(recipe, parts))
            finally:
                parts.engine.detach()
                del parts
                gc.collect()

    def _build(self, recipe: Recipe, layers: int | None, stand_ins: StandIns) -> _Built:
        material = self.material
        config = copy.deepcopy(material.config) if layers is None else shorten(material.config, layers)
        model: nn.Module = build_by_config(
            recipe.model, config, material.pad_token_id, architecture=material.architecture
        )
        if recipe.backward.checkpointing == "full":
            checkpoint_activations(model)
        accelerator = Accelerator(
            mixed_precision=recipe.training.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dynamo_backend="no",
            cpu=True,
        )
        optimizer = build_optimizer(recipe.training, model)
        num_parameters = count_parameters(model)
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        policies = make_policies(recipe)
        before = stand_ins.number
        try:
            engine = attach_policies(policies, recipe, model, optimizer, Reference(material.data))
        except UsageError as error:
            if stand_ins.number > before or type(error) is not UsageError:
                raise
            # No placeholder was read, so the error concerns names and shapes, which are known: a run raises the same.
            raise PolicyError(str(error)) from error
        width = config.get_text_config().vocab_size
        return _Built(
            accelerator.prepare_model(model, device_placement=False, evaluation_mode=True).train(),
            model,
            optimizer,
            engine,
            accelerator,
            policies,
            num_parameters,
            num_trained,
            width,
        )

    def _examples(self, recipe: Recipe, built: _Built) -> _Batch:
        """Return the micro-batch with the columns that the policies read."""
        order = make_order(recipe, self.material)
        set_columns(order, built.policies, recipe, Reference(self.material.data))
        inputs, targets = order.rank_part(self.number)
        return _Batch(inputs, targets, order.candidates)


def set_comparisons(recipe: Recipe, when: Literal["never", "always"]) -> Recipe:
    """Return a recipe whose exact policies compare themselves with the plain step never or always, if they did so at
    some steps."""
    policy = [
        entry.model_copy(update={"verify": when}) if entry.options.get("verify") == "first" else entry
        for entry in recipe.policy
    ]
    return recipe.model_copy(update={"policy": policy})


def make_order(recipe: Recipe, material: Material) -> BatchOrder:
    """Return the order of the micro-batches of a recipe."""
    training = recipe.training
    size, seed = training.per_device_train_batch_size, training.seed
    order = BatchOrder(material.data.train, size, seed, material.pad_token_id, group_by=training.group_by)
    order.gaps = material.data.gaps
    return order


@dataclass(frozen=True)
class _Batch:
    inputs: dict[str, Tensor]
    targets: int
    candidates: str | None  # column of targets that may be trained


@dataclass(frozen=True)
class _Built:
    prepared: nn.Module  # with autocast if the recipe requests it
    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine
    accelerator: Accelerator
    policies: list[Policy]
    num_parameters: int
    num_trained: int
    vocabulary: int


def _run(recipe: Recipe, built: _Built, batch: _Batch) -> StepForecast:
    record, update = FakeRecord(built.vocabulary), UpdateFlops()
    before = _try(built, batch)
    with _counted(record, built) as flops:
        _pass(recipe, built, batch, record)
        of_passes = FlopCount()
        of_passes.by_operator.update(flops.by_operator)
        gradient_bytes = _count_gradients(built)
        record.begin("update")
        with update:
            _update(recipe, built)
    curve = _settle(record.take_curve())
    later = _try(built, batch) if _go_to_trials(recipe, built) else None
    peaks = {phase: point for phase in PHASES if (point := curve.within(phase)) is not None}
    number = min(recipe.training.gradient_accumulation_steps, 2)
    squares = sum(
        count for name, count in of_passes.by_operator.items() if any(part in name for part in (*SQUARES, "attend"))
    )
    return StepForecast(
        policy=describe_policies(recipe.model_dump(mode="json")),
        phases={phase: _split(record, point) for phase, point in peaks.items()},
        pass_flops=of_passes.total / number,
        attention_flops=squares / number,
        update_flops=float(update.flops),
        gradient_bytes=gradient_bytes,
        num_parameters=built.num_parameters,
        num_trained=built.num_trained,
        trial=max((parts for parts in (before, later) if parts is not None), key=_total, default=None),
    )


def _total(parts: Parts) -> int:
    return parts.total


def _try(built: _Built, batch: _Batch) -> Parts | None:
    """Run the due trial passes, all on the one micro-batch, and return their peak; None without any."""
    engine = built.engine
    if not engine.trials_are_due():
        return None
    record = FakeRecord(built.vocabulary)

    def forward() -> Tensor:
        return micro_batch_loss(built.prepared, batch.inputs, batch.targets, CPU, batch.candidates)

    with _counted(record, built):
        record.begin("forward")
        others = [forward] * (engine.count_trial_batches() - 1)
        engine.run_trials(forward, built.accelerator.backward, others=others)
    return _split(record, record.take_curve().peak)


def _go_to_trials(recipe: Recipe, built: _Built) -> bool:
    """Go to the next step with trial passes before it; False if there is none."""
    engine = built.engine
    if not any(isinstance(policy, Stateful) and policy.has_trials for policy in built.policies):
        return False
    index = engine.now().index
    due = (later for later in range(index, recipe.training.max_steps) if engine.trials_are_due(later - index))
    if (later := next(due, None)) is None:
        return False
    engine.load_state_dict(engine.state_dict() | {"index": later})
    return True


@contextmanager
def _counted(record: FakeRecord, built: _Built) -> Iterator[FlopCount]:
    with record, MemoryWatch(record, built.model, built.optimizer), count_flops() as flops:
        yield flops


def _pass(recipe: Recipe, built: _Built, batch: _Batch, record: FakeRecord) -> None:
    """Run forward and backward, twice if there are several micro-batches, because the second meets gradients."""
    number = min(recipe.training.gradient_accumulation_steps, 2)
    engine = built.engine

    for place in range(number):
        record.begin("forward")
        loss = micro_batch_loss(built.prepared, batch.inputs, batch.targets * number, CPU, batch.candidates)
        record.begin("backward")
        engine.backward(loss, built.accelerator.backward, is_last=place == number - 1)
        del loss


def _update(recipe: Recipe, built: _Built) -> None:
    if built.engine.eager is None:
        clip_gradient(recipe.training, built.optimizer)
    built.optimizer.step()
    built.optimizer.zero_grad(set_to_none=True)


def _count_gradients(built: _Built) -> int:
    report = None if built.engine.eager is None else built.engine.eager.report
    if report is not None:
        return report.gradient_bytes
    gradients = [parameter.grad for parameter in built.model.parameters() if parameter.grad is not None]
    return sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def _settle(curve: MemoryCurve) -> MemoryCurve:
    """Return the curve of a later step, in which the optimizer's state exists from the beginning."""
    last = curve.points[-1].split.optimizer
    return MemoryCurve(tuple(replace(p, split=replace(p.split, optimizer=last)) for p in curve.points))


def _split(record: FakeRecord, point: MemoryPoint) -> Parts:
    logits = record.count_logits(point)
    weights, gradients, optimizer, activations, workspace = astuple(point.split)
    return Parts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations - logits["activations"],
        logits=logits.total(),
        workspace=workspace - logits["workspace"],
    )
