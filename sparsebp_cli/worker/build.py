"""Build a training from a plan: model, data, optimizer and engine, and load the newest valid checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.backward.attachment import validates
from sparsebp_cli.errors import DataError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import (
    BatchPacker,
    BlockDropper,
    EpochSelector,
    GradientEstimator,
    Policy,
    find_policies,
    make_policy,
)
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_cli.source import refuse_mismatch, refuse_too_long
from sparsebp_cli.worker.batch import BatchOrder, collate
from sparsebp_cli.worker.checkpoint import CheckpointFolder, Snapshot
from sparsebp_cli.worker.compiled import compile_model
from sparsebp_cli.worker.data import Data, Example, build_data
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.environment import describe_environment
from sparsebp_cli.worker.form_times import choose_forms
from sparsebp_cli.worker.grouping import describe_prefix_gain
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_cli.worker.optimizer import build_optimizer, build_schedule
from sparsebp_cli.worker.policy_phase import PhaseSequence, find_columns, make_phases
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.reference import Reference, build_reference
from sparsebp_cli.worker.resume_check import ResumeCheck, find_journal_gaps
from sparsebp_cli.worker.sharding import shard, sum_gradients
from sparsebp_cli.worker.snapshot import SEED_STEP
from sparsebp_cli.worker.trial_step import NO_DENSE, freezes_parameters

NO_PROBE = (
    "target.sharding: fsdp2 runs without probes (measure.probe_every): the probe cannot distinguish weights gathered "
    "for a layer from tensors saved for the backward"
)


def build_training(
    plan: Plan, run: RunFolder, journal: JournalWriter, stop: StopRequest, ranks: Ranks
) -> tuple[dict[str, Any], Snapshot | None]:
    """Build the parts of a :class:`~sparsebp_cli.worker.training.Training` and record them in the journal. Return the
    arguments of ``Training`` and the checkpoint to resume from, if there is one."""
    recipe = plan.recipe
    checkpoints = CheckpointFolder(run.path / "checkpoints", recipe.checkpoint.keep_last, writes=ranks.is_first)
    snapshot, damaged = _load_checkpoint(checkpoints, ranks)
    guard = ResumeCheck(plan, run, journal, ranks, snapshot)
    _note_start(journal, recipe, snapshot, [*damaged, *_find_lost(run, snapshot, recipe)], ranks)
    disable_progress_bar()  # the log is read by people and by programs
    phases = make_phases(recipe)
    policies = [policy for phase in phases for policy in phase.policies]
    accelerator = _build_accelerator(recipe, ranks, policies)
    tokenizer, reference = _load_data(recipe, policies, accelerator, journal)
    data = reference.data
    guard.check_data(data.digest())
    set_seed(recipe.training.seed)
    num_labels = len(data.label_names) if recipe.dataset.format == "classification" else None
    model = build_model(
        recipe.model, tokenizer, num_labels, lambda text: journal.write("note", level="info", text=text)
    )
    _check_fit(model, tokenizer, recipe)
    if recipe.backward.checkpointing == "full":
        checkpoint_activations(model)
    model.to(accelerator.device)
    optimizer = build_optimizer(recipe.training, model)
    sequence = PhaseSequence(phases, recipe, model, optimizer, reference, _collate_set_aside(data, tokenizer))
    engine = sequence.attach(phase := sequence.at(snapshot.step if snapshot else 0))
    choose_forms(engine, recipe, phases, accelerator, run, journal, snapshot, ranks)
    schedule = build_schedule(recipe.training, optimizer)
    with engine.disabled():  # a policy may have frozen parameters for the first step; report and shard all of them
        facts = _facts(plan, model, reference, accelerator)  # before sharding, which leaves only this rank's parameters
        if ranks.is_sharded:
            shard(model, optimizer, accelerator.device)
    if ranks.count > 1 and freezes_parameters(engine):
        journal.write("note", level="info", text=NO_DENSE)
    prepared = accelerator.prepare_model(model, evaluation_mode=ranks.is_sharded)  # evaluation mode: no DDP wrapper
    if ranks.count > 1:
        sum_gradients(prepared)
        if ranks.rank:  # weights are initialised alike on every rank; dropout must differ from here on
            set_seed((recipe.training.seed + SEED_STEP * ranks.rank) % 2**32)
    compiled = compile_model(prepared, accelerator.device) if recipe.training.compile else None
    journal.write("facts", values=facts | ({"reference": reference.facts} if reference.facts else {}))
    _tell_prefix_gain(recipe, policies, data.train, ranks, journal)
    parts = {
        "plan": plan,
        "run": run,
        "journal": journal,
        "stop": stop,
        "accelerator": accelerator,
        "model": prepared,
        "compiled": compiled,
        "engine": engine,
        "phases": sequence,
        "optimizer": accelerator.prepare_optimizer(optimizer),
        "schedule": schedule,
        "order": sequence.set_columns(_build_order(recipe, policies, reference, tokenizer.pad_token_id, ranks), phase),
        "held_out": data.held_out,
        "test": data.test,
        "checkpoints": checkpoints,
        "tokenizer": tokenizer,
        "seal": guard.seal,
        "ranks": ranks,
    }
    return parts, snapshot


def _collate_set_aside(data: Data, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor] | None:
    if not data.set_aside:
        return None
    assert isinstance(tokenizer.pad_token_id, int)
    return collate(list(data.set_aside.values()), tokenizer.pad_token_id)


def _build_order(
    recipe: Recipe, policies: Sequence[Policy], reference: Reference, pad_token_id: int, ranks: Ranks
) -> BatchOrder:
    training = recipe.training
    order = BatchOrder(
        reference.data.train,
        training.per_device_train_batch_size,
        training.seed,
        pad_token_id,
        rank=(ranks.rank, ranks.count),
        group_by=training.group_by,
    )
    if any(isinstance(policy, EpochSelector | GradientEstimator) for policy in policies):
        refuse_unsupported(recipe)  # attach sees neither the first kind nor checkpointing: full
    for policy in policies:
        if isinstance(policy, EpochSelector):
            order.choose_epochs(
                policy, num_steps=training.max_steps, micro_batches=training.gradient_accumulation_steps
            )
    return order


def _tell_prefix_gain(
    recipe: Recipe, policies: Sequence[Policy], examples: Sequence[Example], ranks: Ranks, journal: JournalWriter
) -> None:
    shares = any(isinstance(policy, BatchPacker) and policy.prefixes == "share" for policy in policies)
    if shares and recipe.training.group_by is None and recipe.dataset.format != "classification":
        batch_size = recipe.training.per_device_train_batch_size * ranks.count
        line = describe_prefix_gain(examples, batch_size, recipe.training.seed)
        if line is not None:
            journal.write("note", level="info", text=line)


def save_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, run: RunFolder, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the trained model and tokenizer to the run's folder as transformers does, atomically. ``weights`` is the
    complete state_dict of a sharded model."""
    place, part = run.path / "model", run.path / ".part-model"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part, state_dict=weights)  # type: ignore[operator]
    tokenizer.save_pretrained(part)
    shutil.rmtree(place, ignore_errors=True)
    part.rename(place)


def _load_checkpoint(checkpoints: CheckpointFolder, ranks: Ranks) -> tuple[Snapshot | None, list[str]]:
    """Load on every rank the checkpoint that the first rank found valid."""
    snapshot, damaged = checkpoints.load_newest_good() if ranks.is_first else (None, [])
    step = ranks.broadcast(None if snapshot is None else snapshot.step)
    return checkpoints.load(step) if snapshot is None and step is not None else snapshot, damaged


def _find_lost(run: RunFolder, snapshot: Snapshot | None, recipe: Recipe) -> list[str]:
    """Return a note for each record of completed steps that the journal has lost."""
    history = History.load(run.path)
    gaps = find_journal_gaps(history, snapshot.step, recipe) if snapshot else []
    return [*filter(None, [history.describe_unreadable()]), *gaps]


def _note_start(
    journal: JournalWriter, recipe: Recipe, snapshot: Snapshot | None, lost: list[str], ranks: Ranks
) -> None:
    step = snapshot.step if snapshot else 0
    journal.write("attempt", from_step=step, environment=describe_environment())
    for text in lost:
        journal.write("note", level="warning", text=f"{text}; going on from step {step}")
    if ranks.is_sharded and recipe.measure.probe_every is not None:
        journal.write("note", level="info", text=NO_PROBE)


def _load_data(
    recipe: Recipe, policies: Sequence[Policy], accelerator: Accelerator, journal: JournalWriter
) -> tuple[PreTrainedTokenizerBase, Reference]:
    set_seed(recipe.training.seed)
    with accelerator.main_process_first():  # the first rank downloads and fills the caches that the others then read
        tokenizer = build_tokenizer(recipe.model)
        data = build_data(recipe.dataset, tokenizer, find_columns(policies))

        def tell(text: str) -> None:
            journal.write("note", level="info", text=text)

        reference = build_reference(policies, recipe, data, tokenizer, accelerator, tell)
    number = recipe.dataset.policy_validation_examples
    if number is not None and not any(map(validates, policies)):  # a control trains on the same examples
        tell(f"dataset.policy_validation_examples: {number} training examples are set aside, and no policy reads them")
    return tokenizer, replace(reference, data=reference.data.with_set_aside(number, recipe.training.seed))


def _build_accelerator(recipe: Recipe, ranks: Ranks, policies: Sequence[Policy]) -> Accelerator:
    if recipe.target.device == "cuda" and not torch.cuda.is_available():
        raise DataError("target.device: cuda, but torch finds no CUDA device here; use auto or cpu")
    threads = recipe.target.threads
    if ranks.count > 1:
        threads = threads or max(1, torch.get_num_threads() // ranks.count)
    drops = any(isinstance(policy, BlockDropper) for policy in policies)  # and so leaves parameters without a gradient
    accelerator = Accelerator(
        mixed_precision=recipe.training.mixed_precision,
        cpu=recipe.target.device == "cpu",
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if drops else [],
    )
    if threads is not None:
        torch.set_num_threads(threads)
    return accelerator


def _check_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    refuse_mismatch(len(tokenizer), model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    try:
        refuse_too_long({"max_position_embeddings": longest}, recipe.dataset.max_seq_length)
    except DataError as error:
        raise DataError(f"dataset.max_seq_length: {error}") from None


def _facts(plan: Plan, model: nn.Module, reference: Reference, accelerator: Accelerator) -> dict[str, object]:
    recipe, data, found = plan.recipe, reference.data, find_policies()
    policies = [(entry.name, make_policy(entry.name, **entry.options)) for entry in recipe.policies]
    tokens = sum(len(example.input_ids) for example in data.train) / len(data.train)
    training = recipe.training
    return {
        "max_steps": training.max_steps,
        "warmup_steps": recipe.measure.warmup_steps,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dataset_digest": data.digest(without=reference.columns),  # a control trains on the same data without scores
        "train_examples": len(data.train),
        "eval_examples": len(data.held_out),
        **({"policy_validation_examples": len(data.set_aside)} if data.set_aside else {}),
        **({"test_examples": len(data.test)} if data.test else {}),
        "label_names": data.label_names,
        "tokens_per_step": round(
            tokens
            * training.per_device_train_batch_size
            * accelerator.num_processes
            * training.gradient_accumulation_steps
        ),
        "model_class": type(model).__name__,
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "policies": [
            {"name": name, "exact": policy.exact, "unbiased": policy.unbiased, "source": found[name].source}
            for name, policy in policies
        ],
    }
