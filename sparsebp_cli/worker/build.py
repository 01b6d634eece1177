"""From a plan to a training: model, data, optimizer, engine, and the last good checkpoint."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import DataError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import find_policies, make_policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.checkpoint import CheckpointFolder, Snapshot
from sparsebp_cli.worker.data import Data, build_data
from sparsebp_cli.worker.environment import describe_environment
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_cli.worker.optimizer import build_optimizer, build_schedule
from sparsebp_cli.worker.stop import StopRequest


def build_training(
    plan: Plan, run: RunFolder, journal: JournalWriter, stop: StopRequest
) -> tuple[dict[str, Any], Snapshot | None]:
    """Build the parts of a :class:`~sparsebp_cli.worker.training.Training`, and say in the journal what they are.

    Args:
        plan: What to build.
        run: Where checkpoints are.
        journal: Receives the attempt, the facts and any warning.
        stop: Passed on.

    Returns:
        The arguments of ``Training``, and the checkpoint to go on from, if there is one.

    Raises:
        DataError: Model, data or optimizer cannot be had as the recipe says.
        CheckpointError: There are checkpoints and none is good.
    """
    recipe = plan.recipe
    checkpoints = CheckpointFolder(run.path / "checkpoints", recipe.checkpoint.keep_last)
    snapshot, damaged = checkpoints.load_newest_good()
    journal.write("attempt", from_step=snapshot.step if snapshot else 0, environment=describe_environment())
    for text in damaged:
        journal.write("note", level="warning", text=f"{text}; going on from step {snapshot.step if snapshot else 0}")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the log is read by people and by programs
    accelerator = _build_accelerator(recipe)
    set_seed(recipe.training.seed)
    tokenizer = build_tokenizer(recipe.model)
    data = build_data(recipe.dataset, tokenizer)
    is_classification = recipe.dataset.format == "classification"
    set_seed(recipe.training.seed)
    model = build_model(recipe.model, tokenizer, len(data.label_names) if is_classification else None)
    _check_fit(model, tokenizer, recipe)
    if recipe.backward.checkpointing == "full":
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(accelerator.device)
    optimizer = build_optimizer(recipe.training, [p for p in model.parameters() if p.requires_grad])
    engine = attach(
        model,
        [make_policy(entry.name, **entry.options) for entry in recipe.policy],
        sites=recipe.backward.sites,
        optimizer=optimizer,
        update=recipe.backward.update,
        checkpointing="none" if recipe.backward.checkpointing == "full" else recipe.backward.checkpointing,
        engine=recipe.backward.engine,
        exclude=recipe.backward.exclude,
        seed=recipe.training.seed,
    )
    schedule = build_schedule(recipe.training, optimizer)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    journal.write("facts", values=_facts(plan, model, data, accelerator))
    size = recipe.training.per_device_train_batch_size
    parts = {
        "plan": plan,
        "run": run,
        "journal": journal,
        "stop": stop,
        "accelerator": accelerator,
        "model": prepared,
        "engine": engine,
        "optimizer": prepared_optimizer,
        "schedule": schedule,
        "order": BatchOrder(data.train, size, recipe.training.seed, tokenizer.pad_token_id),
        "held_out": data.held_out,
        "checkpoints": checkpoints,
        "tokenizer": tokenizer,
    }
    return parts, snapshot


def save_model(model: nn.Module, tokenizer: Any, run: RunFolder) -> None:
    """Write the trained model into the run's folder as transformers does, whole or not at all.

    Args:
        model: Without the engine.
        tokenizer: Its tokenizer.
        run: The run.
    """
    place, part = run.path / "model", run.path / ".part-model"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)  # type: ignore[operator]
    tokenizer.save_pretrained(part)
    shutil.rmtree(place, ignore_errors=True)
    part.rename(place)


def _build_accelerator(recipe: Recipe) -> Accelerator:
    if recipe.target.threads is not None:
        torch.set_num_threads(recipe.target.threads)
    if recipe.target.device == "cuda" and not torch.cuda.is_available():
        raise DataError("target.device: cuda, but torch finds no CUDA device here; use auto or cpu")
    return Accelerator(mixed_precision=recipe.training.mixed_precision, cpu=recipe.target.device == "cpu")


def _check_fit(model: Any, tokenizer: Any, recipe: Recipe) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise DataError(f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows: not a pair")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and recipe.dataset.max_seq_length > longest:
        raise DataError(
            f"dataset.max_seq_length: must be at most {longest} for this model, got {recipe.dataset.max_seq_length}"
        )


def _facts(plan: Plan, model: nn.Module, data: Data, accelerator: Accelerator) -> dict[str, Any]:
    recipe, found = plan.recipe, find_policies()
    policies = [(entry.name, make_policy(entry.name, **entry.options)) for entry in recipe.policy]
    tokens = sum(len(example.input_ids) for example in data.train) / len(data.train)
    training = recipe.training
    return {
        "max_steps": training.max_steps,
        "warmup_steps": recipe.measure.warmup_steps,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dataset_digest": data.digest(),
        "train_examples": len(data.train),
        "eval_examples": len(data.held_out),
        "label_names": data.label_names,
        "tokens_per_step": round(tokens * training.per_device_train_batch_size * training.gradient_accumulation_steps),
        "model_class": type(model).__name__,
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        "policies": [
            {"name": name, "exact": policy.exact, "unbiased": policy.unbiased, "source": found[name].source}
            for name, policy in policies
        ],
    }
