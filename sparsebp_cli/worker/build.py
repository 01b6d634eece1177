"""Build a training from a plan: model, data, optimizer and engine, and load the newest valid checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, set_seed
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT, LossWeights
from sparsebp_cli.backward.linear.quantized import count_parameters
from sparsebp_cli.errors import DataError, UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import (
    Policy,
    find_policies,
    make_policy,
)
from sparsebp_cli.policy.known_kind import find_columns, list_kinds
from sparsebp_cli.recipe.evaluation import declare_generated, to_facts
from sparsebp_cli.recipe.schema import ModelSection, Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder, durable, manifest
from sparsebp_cli.run.census import find_warnings
from sparsebp_cli.source import refuse_mismatch, refuse_too_long
from sparsebp_cli.source.adapter import INSIDE
from sparsebp_cli.source.attention import refuse_device, refuse_missing_package
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from sparsebp_cli.worker.adapter import is_adapted, merge_beside
from sparsebp_cli.worker.asked import find_questions
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.checkpoint import CheckpointFolder, Snapshot
from sparsebp_cli.worker.compiled import compile_model
from sparsebp_cli.worker.data import Data, build_data
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.environment import describe_environment
from sparsebp_cli.worker.model import build_model, build_tokenizer, read_architecture, read_head
from sparsebp_cli.worker.optimizer import build_optimizer, build_schedule
from sparsebp_cli.worker.policy import attach_policies, make_policies, set_columns
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.prompt import HeldOutPrompts, make_prompts
from sparsebp_cli.worker.reference import Reference, build_reference
from sparsebp_cli.worker.reload import ReloadedOutputs, make_batch
from sparsebp_cli.worker.resume_check import ResumeCheck, find_journal_gaps
from sparsebp_cli.worker.sharding import shard, sum_gradients
from sparsebp_cli.worker.snapshot import SEED_STEP
from sparsebp_cli.worker.trial_step import NO_DENSE, freezes_parameters

NO_PROBE = (
    "target.sharding: with fsdp2, the run makes no probes (measure.probe_every), because a probe cannot distinguish "
    "weights gathered for a layer from tensors saved for the backward"
)


def build_training(
    plan: Plan, run: RunFolder, journal: JournalWriter, stop: StopRequest, ranks: Ranks
) -> tuple[dict[str, Any], Snapshot | None]:
    """Build the parts of a :class:`~sparsebp_cli.worker.training.Training` and record them in the event log. Return the
    arguments of ``Training``, and the checkpoint to resume from; None if there is none."""
    recipe = plan.recipe
    checkpoints = CheckpointFolder(run.path / "checkpoints", recipe.checkpoint.keep_last, writes=ranks.is_first)
    snapshot, damaged = _load_checkpoint(checkpoints, ranks)
    guard = ResumeCheck(plan, run, journal, ranks, snapshot)
    _note_start(journal, recipe, snapshot, [*damaged, *_find_lost(run, snapshot, recipe)], ranks)
    disable_progress_bar()  # people and programs read the log
    policies = make_policies(recipe)
    accelerator = _build_accelerator(recipe, ranks, policies)
    _check_attention(recipe.model, accelerator.device)
    tokenizer, reference = _load_data(recipe, policies, accelerator, journal, is_begun=snapshot is not None)
    data = reference.data
    guard.check_data(data.digest())
    # Seed again, so that random weights do not depend on draws made for data and reference.
    set_seed(recipe.training.seed)
    model = _build_model(recipe, policies, tokenizer, data, journal)
    _check_fit(model, tokenizer, recipe)
    if recipe.backward.checkpointing == "full":
        checkpoint_activations(model)
    model.to(accelerator.device)
    optimizer = build_optimizer(recipe.training, model)
    engine = attach_policies(policies, recipe, model, optimizer, reference)
    schedule = build_schedule(recipe.training, optimizer)
    with engine.disabled():  # the policy may have frozen parameters for the first step; report and shard all of them
        facts = _facts(plan, model, reference, accelerator)  # before sharding, which leaves only this rank's parameters
        if ranks.is_sharded:
            shard(model, optimizer, accelerator.device)
    if ranks.count > 1 and freezes_parameters(engine):
        journal.write("note", level="info", text=NO_DENSE)
    prepared = accelerator.prepare_model(model, evaluation_mode=ranks.is_sharded)  # evaluation mode: no DDP wrapper
    if ranks.count > 1:
        sum_gradients(prepared)
        if ranks.rank:  # all ranks initialise equal weights; from here on dropout must differ
            set_seed((recipe.training.seed + SEED_STEP * ranks.rank) % 2**32)
    compiled = compile_model(prepared, accelerator.device) if recipe.training.compile else None
    journal.write("facts", values=facts | ({"reference": reference.facts} if reference.facts else {}))
    parts = {
        "plan": plan,
        "run": run,
        "journal": journal,
        "stop": stop,
        "accelerator": accelerator,
        "model": prepared,
        "compiled": compiled,
        "engine": engine,
        "policies": policies,
        "reference": reference,
        "optimizer": accelerator.prepare_optimizer(optimizer),
        "schedule": schedule,
        "order": _build_order(recipe, policies, reference, tokenizer.pad_token_id, ranks),
        "held_out": data.held_out,
        "test": data.test,
        "prompts": _make_prompts(recipe, data, tokenizer),
        "checkpoints": checkpoints,
        "tokenizer": tokenizer,
        "seal": guard.seal,
        "ranks": ranks,
    }
    return parts, snapshot


def _build_model(
    recipe: Recipe,
    policies: Sequence[Policy],
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    journal: JournalWriter,
) -> PreTrainedModel:
    num_labels = len(data.label_names) if recipe.dataset.format == "classification" else None
    model = build_model(
        recipe.model,
        tokenizer,
        num_labels,
        lambda text: journal.write("note", level="info", text=text),
        architecture=read_architecture(recipe.model, recipe.dataset.format),
    )
    if num_labels is not None:  # the files of the trained model name its classes
        model.config.id2label = dict(enumerate(data.label_names))
        model.config.label2id = {name: number for number, name in enumerate(data.label_names)}
    if any(LOSS_WEIGHT in example.columns for example in data.train):
        _accept_weights(model, recipe, policies)
    return model


def _accept_weights(model: nn.Module, recipe: Recipe, policies: Sequence[Policy]) -> None:
    """Make the model's forward accept token weights. Raise DataError if policy, compilation or model forbid them."""
    what = "message weights"
    for policy in policies:
        if any(kind.weighs_examples for kind in list_kinds([policy])):
            raise DataError(f"{what} do not work with {type(policy).__name__}, which weights examples: use one")
    if recipe.training.compile:
        raise DataError(f"{what} do not work with 'training.compile: true': use false")
    try:
        LossWeights(model)
    except UnsupportedError as error:
        raise DataError(f"{what}: {error}") from None


def _make_prompts(recipe: Recipe, data: Data, tokenizer: PreTrainedTokenizerBase) -> HeldOutPrompts:
    """Return the prompts of both held-out splits with their references, none without generation; and the prompts for
    the saved model."""
    generate = recipe.measure.generate
    # Render only when asked at the end, because rendering conversations takes a separate process.
    asked = partial(find_questions, data.held_out_rows, data.held_out, recipe.dataset, tokenizer)
    if generate is None:
        return HeldOutPrompts(find_asked=asked)
    validation = make_prompts(data.held_out_rows, data.held_out[: generate.examples], recipe.dataset, tokenizer)
    tests = data.test if recipe.measure.test else []
    return HeldOutPrompts(validation, make_prompts(data.test_rows, tests, recipe.dataset, tokenizer), asked)


def _build_order(
    recipe: Recipe,
    policies: Sequence[Policy],
    reference: Reference,
    pad_token_id: int,
    ranks: Ranks,
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
    order.gaps = reference.data.gaps
    return set_columns(order, policies, recipe, reference)


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    run: RunFolder,
    weights: Mapping[str, Tensor] | None = None,
    name: str = "model",
    *,
    keeps: bool = False,
    outputs: ReloadedOutputs | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Write the trained model and tokenizer atomically and durably to a folder of the run, as transformers does.
    Adapters are merged; the folder ``adapter`` holds them separately. ``weights`` is the complete state_dict of a
    sharded model without adapters. ``keeps`` is passed to :func:`~sparsebp_cli.worker.adapter.merge_beside`. The
    written files must reproduce ``outputs``, the trained model's outputs, before they replace others. Return the record
    of that comparison, with the saved model's answers."""
    place, part = run.path / name, run.path / f"{durable.PART}{name}"
    shutil.rmtree(part, ignore_errors=True)
    if is_adapted(model):
        _save_plain(merge_beside(model, part / INSIDE, keeps=keeps), part, None)
    else:
        _save_plain(model, part, weights)
    tokenizer.save_pretrained(part)
    record = {} if outputs is None else outputs.check(part, device or torch.device("cpu"))
    # `prune` and the clients of targets compare by the manifest before they delete another copy.
    compared = {key: value for key, value in record.items() if key not in {"asked", "unasked"}}  # texts may be private
    manifest.write_manifest(part, {manifest.OUTPUTS: compared} if compared else None)
    durable.put_folder(part, place)
    return record


def write_whole(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer into a folder, with its adapters merged and not kept separately. The model must
    not be used afterwards. Raise RunFailedError if the files give other outputs."""
    outputs = ReloadedOutputs.of(model, make_batch(len(tokenizer)))
    if is_adapted(model):
        with TemporaryDirectory(dir=folder, prefix=durable.PART) as place:
            model = merge_beside(model, Path(place), keeps=False)
            _save_plain(model, folder, None)
    else:
        _save_plain(model, folder, None)
    tokenizer.save_pretrained(folder)
    outputs.check(folder, torch.device("cpu"))


def rebuild(
    model: nn.Module, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Return a sharded model as a whole model on the host. ``weights`` is its complete state_dict."""
    config: Any = model.config
    num_labels = config.num_labels if recipe.dataset.format == "classification" else None
    architecture = read_architecture(recipe.model, recipe.dataset.format)
    whole = build_model(recipe.model, tokenizer, num_labels, architecture=architecture)
    whole.load_state_dict(weights)
    whole.config.update(config.to_dict())  # such as the names of labels
    return whole


def _save_plain(model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    """Save a model with the ``use_cache`` setting of its source, which training switches off."""
    config: Any = model.config
    used, config.use_cache = config.use_cache, getattr(model, "source_use_cache", config.use_cache)
    try:
        model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
    finally:
        config.use_cache = used


def _load_checkpoint(checkpoints: CheckpointFolder, ranks: Ranks) -> tuple[Snapshot | None, list[str]]:
    """Load on every rank the checkpoint that the first rank found valid."""
    snapshot, damaged = checkpoints.load_newest_good() if ranks.is_first else (None, [])
    step = ranks.broadcast(None if snapshot is None else snapshot.step)
    return checkpoints.load(step) if snapshot is None and step is not None else snapshot, damaged


def _find_lost(run: RunFolder, snapshot: Snapshot | None, recipe: Recipe) -> list[str]:
    """Return a note for each record of completed steps that is missing in the event log."""
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
    recipe: Recipe, policies: Sequence[Policy], accelerator: Accelerator, journal: JournalWriter, *, is_begun: bool
) -> tuple[PreTrainedTokenizerBase, Reference]:
    set_seed(recipe.training.seed)
    with accelerator.main_process_first():  # the first rank downloads and fills the caches that the others then read
        tokenizer = build_tokenizer(recipe.model)
        if recipe.dataset.chat_template is not None:
            tokenizer.chat_template = recipe.dataset.chat_template  # saved with the model, which needs it
        architecture = read_architecture(recipe.model, recipe.dataset.format)
        # A run with a checkpoint may have begun before texts were checked: only warn, so that it can finish.
        head, columns = read_head(recipe.model, recipe.dataset.format), find_columns(policies)
        data = build_data(recipe.dataset, tokenizer, columns, architecture, head=head, refuses=not is_begun)
        for level, text in find_warnings(data.census):
            journal.write("note", level=level, text=text)

        def tell(text: str) -> None:
            journal.write("note", level="info", text=text)

        reference = build_reference(policies, recipe, data, tokenizer, accelerator, tell)
    return tokenizer, reference


def _build_accelerator(recipe: Recipe, ranks: Ranks, policies: Sequence[Policy]) -> Accelerator:
    if recipe.target.device == "cuda" and not torch.cuda.is_available():
        raise DataError("target.device is cuda, but torch finds no CUDA device here; use auto or cpu")
    threads = recipe.target.threads
    if ranks.count > 1:
        # Otherwise each rank would use as many threads as there are cores.
        threads = threads or max(1, torch.get_num_threads() // ranks.count)
    drops = any(kind.leaves_out_gradients for kind in list_kinds(policies))
    # DDP waits for a gradient of each parameter, unless it looks for unused ones.
    accelerator = Accelerator(
        mixed_precision=recipe.training.mixed_precision,
        # Pass a plug-in: an environment variable overrides the argument gradient_accumulation_steps, and divides every
        # loss.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        # For several ranks without CUDA, accelerate joins them only if the CPU is requested. See ranks.on_cuda.
        cpu=recipe.target.device == "cpu" or (ranks.count > 1 and not ranks.on_cuda),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if drops else [],
    )
    if threads is not None:
        # After accelerate, which itself sets the number of threads for CPU processes.
        torch.set_num_threads(threads)
    return accelerator


def _check_attention(section: ModelSection, device: torch.device) -> None:
    """Refuse an attention implementation that this machine lacks, before data and weights are read."""
    refuse_device(section.attention, device.type)
    try:
        refuse_missing_package(section.attention)
    except DataError as error:
        raise DataError(f"model.attention: {error}") from None


def _check_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    embeddings: Any = model.get_input_embeddings()  # an adapter's layer has only the weight
    refuse_mismatch(len(tokenizer), embeddings.weight.shape[0])
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    try:
        refuse_too_long({"max_position_embeddings": longest}, recipe.dataset.max_seq_length)
    except DataError as error:
        raise DataError(f"dataset.max_seq_length: {error}") from None


def _facts(plan: Plan, model: nn.Module, reference: Reference, accelerator: Accelerator) -> dict[str, object]:
    recipe, data, found = plan.recipe, reference.data, find_policies()
    policies = [(entry.name, make_policy(entry.name, **entry.options)) for entry in recipe.policy]
    tokens = sum(len(example.input_ids) for example in data.train) / len(data.train)
    training = recipe.training
    return {
        "max_steps": training.max_steps,
        "warmup_steps": recipe.measure.warmup_steps,
        "num_parameters": count_parameters(model),
        "num_trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dataset_digest": data.digest(without=reference.columns),  # a control trains on the same data without scores
        "train_examples": len(data.train),
        "eval_examples": len(data.held_out),
        **({"metrics": to_facts(declared)} if (declared := declare_generated(recipe)) else {}),
        **({"test_examples": len(data.test)} if data.test else {}),
        "label_names": data.label_names,
        "census": data.census,
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
