"""Convert between a running training and the snapshot that a checkpoint stores."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.patch.rewind import capture_rng, restore_rng
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.recipe.schema import TrainingSection
from sparsebp_cli.worker.allowance import Allowance
from sparsebp_cli.worker.checkpoint import RankState, Snapshot
from sparsebp_cli.worker.price import StepPrice
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import copy_full, gather, gather_optimizer, load_optimizer
from sparsebp_cli.worker.trial_step import trainable_parameters

SEED_STEP = 1_000_003  # difference between the dropout seeds of two ranks; larger than usual differences of seeds
_POLICY = "policy state: "  # prefix of the policies' state tensors


class Restorable:
    """The attributes of a training from which a snapshot is taken, and into which it is restored."""

    step: int
    tokens: int

    plan: Plan
    ranks: Ranks
    seal: Seal
    bare: nn.Module
    engine: Engine
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    allowance: Allowance
    price: StepPrice
    accelerator: Accelerator


def take_snapshot(training: Restorable) -> Snapshot:
    """Return all that a run needs to resume here. Collective; only the first rank's snapshot is complete."""
    ranks = training.ranks
    engine = training.engine.state_dict()
    tensors = dict[str, Tensor]()
    if (kept := engine.get("policy_state")) is not None:
        tensors |= {f"{_POLICY}{name}": value for name, value in kept.items() if isinstance(value, Tensor)}
        engine["policy_state"] = {name: value for name, value in kept.items() if not isinstance(value, Tensor)}
    own = ranks.gather(RankState({name: tensor.cpu() for name, tensor in tensors.items()}, capture_rng()))
    rest = {
        "schedule": training.schedule.state_dict(),
        "engine": engine,
        "tokens": training.tokens,
        "spent": training.allowance.state_dict(),
        "price": training.price.state_dict(),
    }
    # Store trained weights and buffers; frozen weights come from the recipe again. See decision 7.
    weights = gather(_weights(training), keep=ranks.is_first)
    optimizer = gather_optimizer(training.optimizer, keep=ranks.is_first)
    return Snapshot(training.step, weights, optimizer, rest, own, training.seal.to_json())


def restore(training: Restorable, snapshot: Snapshot) -> None:
    """Restore a snapshot into a new training. Raise UnsupportedError if model, optimizer or processes do not fit."""
    ranks = training.ranks
    _check_fit(training, snapshot)
    own = snapshot.ranks[ranks.rank] if ranks.count == len(snapshot.ranks) else _redistribute(training, snapshot)
    try:
        for name, tensor in _weights(training).items():
            copy_full(tensor, snapshot.weights[name])
        options = [dict(group) for group in training.optimizer.param_groups]
        load_optimizer(training.optimizer, snapshot.optimizer)
        training.schedule.load_state_dict(snapshot.rest["schedule"])
        _set_options(training, Seal.from_json(snapshot.seal or {}), options)
        device = training.accelerator.device
        kept = {
            name.removeprefix(_POLICY): tensor.to(device)
            for name, tensor in own.policy.items()
            if name.startswith(_POLICY)
        }
        state = dict(snapshot.rest["engine"])
        if "policy_state" in state:
            state["policy_state"] = state["policy_state"] | kept
        training.engine.load_state_dict(state)
        training.step, training.tokens = snapshot.step, snapshot.rest["tokens"]
        training.allowance.load_state_dict(snapshot.rest.get("spent", {}))  # older checkpoints have none
        training.price.load_state_dict(snapshot.rest.get("price", {}))
        if own.rng:
            restore_rng(own.rng)
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError, ArithmeticError) as error:
        # optimizers, policies and generators raise these for a state that does not fit
        raise UnsupportedError(
            f"the checkpoint of step {snapshot.step} does not fit this run's recipe: {type(error).__name__}: {error}"
        ) from error


def _set_options(training: Restorable, then: Seal | None, options: list[dict[str, Any]]) -> None:
    """Set the optimizer's options as the recipe asks now: a loaded state brings back those of the checkpoint."""
    before: Any = then.recipe["training"] if then is not None else {}
    names = (*(before.get("optim_args") or ()), *training.plan.recipe.training.optim_args)
    asked = {"initial_lr", "weight_decay", *names}
    for group, now in zip(training.optimizer.param_groups, options, strict=True):
        group["lr"] *= now["initial_lr"] / group["initial_lr"]  # 1.0 unless the learning rate changed
        group |= {name: now[name] for name in asked & now.keys()}
    training.schedule.base_lrs = [group["initial_lr"] for group in options]


def _redistribute(training: Restorable, snapshot: Snapshot) -> RankState:
    """Return this rank's state from a checkpoint of another number of processes. Raise UnsupportedError if its steps
    would use other examples."""
    ranks, count = training.ranks, len(snapshot.ranks)
    before = f"the checkpoint of step {snapshot.step} was written by {count} process{'es' * (count > 1)}"
    section = training.plan.recipe.training
    seal = Seal.from_json(snapshot.seal or {})
    if seal is None:
        raise UnsupportedError(f"{before} and has no record of its batch size: resume with target.processes: {count}")
    then = TrainingSection.model_validate(seal.recipe["training"])
    batches = (then.per_device_train_batch_size * count, section.per_device_train_batch_size * ranks.count)
    steps = (batches[0] * then.gradient_accumulation_steps, batches[1] * section.gradient_accumulation_steps)
    if steps[0] != steps[1]:
        raise UnsupportedError(
            f"{before} with {steps[0]} examples per step, but 'target.processes: {ranks.count}' gives {steps[1]}: "
            f"set training.per_device_train_batch_size so that both are equal"
        )
    if section.group_by is not None and batches[0] != batches[1]:
        raise UnsupportedError(
            f"{before} with {batches[0]} examples per micro-batch, but this run sets {batches[1]}: "
            f"with 'training.group_by: {section.group_by}', both must be equal"
        )
    # An additional process has no stored generators: seed them as at the start, but shifted, so that no numbers repeat.
    if ranks.rank >= count:
        set_seed((section.seed + SEED_STEP * ranks.rank + snapshot.step) % 2**32)
    generators = snapshot.ranks[ranks.rank].rng if ranks.rank < count else {}
    return RankState(snapshot.ranks[0].policy, generators)


def _check_fit(training: Restorable, snapshot: Snapshot) -> None:
    """Refuse a checkpoint of another model or optimizer, or of a step after the plan's last one."""
    before = f"the checkpoint of step {snapshot.step} does not fit this run's recipe"
    max_steps = training.plan.recipe.training.max_steps
    if snapshot.step > max_steps:
        raise UnsupportedError(f"{before}, because training ends at step {max_steps} (training.max_steps)")
    mine = {name: tuple(tensor.shape) for name, tensor in _weights(training).items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in snapshot.weights.items()}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            shapes = [
                f"shape {list(shape)}" if shape is not None else "none" for shape in (theirs.get(name), mine.get(name))
            ]
            raise UnsupportedError(f"{before}: {name} has {shapes[0]}, but {shapes[1]} in this run's model")
    groups, stored = training.optimizer.state_dict()["param_groups"], snapshot.optimizer["param_groups"]
    if [set(group) for group in groups] != [set(group) for group in stored]:
        raise UnsupportedError(f"{before}: another optimizer than {training.plan.recipe.training.optim} was used")
    if [group["params"] for group in groups] != [group["params"] for group in stored]:
        raise UnsupportedError(f"{before}: other parameters had weight decay (training.weight_decay_of)")


def _weights(training: Restorable) -> dict[str, Tensor]:
    """Return trained parameters, and the buffers that transformers would save."""
    saved = training.bare.state_dict()
    buffers = {name: b for name, b in training.bare.named_buffers() if name in saved}
    return trainable_parameters(training.bare, training.engine) | buffers
