"""Checks of a ``transformers.Trainer`` and its batches against the table of supported combinations."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsebp_cli.backward import Engine
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Policy, TokenSelector
from sparsebp_cli.policy.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.policy.known_kind import find_facts, list_kinds

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer


def refuse_unsupported(trainer: Trainer, policies: Sequence[Policy] = ()) -> None:
    """Raise UnsupportedError for the first trainer feature that the engine does not support with these policies."""
    pairs = [(PolicyFacts.of(policy), _sees_labels(policy)) for policy in policies]
    facts = [replace(found, facts={"fits_head": False, **found.facts, "sees_labels": sees}) for found, sees in pairs]
    options = _describe(trainer)
    refuse(Setup(facts, options, words={"lomo": f"optim={options['lomo']!r}"}))


def model_of(trainer: Trainer) -> nn.Module:
    """Return the model of a trainer, which exists even if the trainer got ``model_init``."""
    assert trainer.model is not None
    return trainer.model


def make_first_batch(trainer: Trainer) -> Mapping[str, object]:
    """Return the trainer's batch for the first example, without effects on random generators. Return an empty mapping
    if the trainer's class may use arguments itself, or if its data can be read only once."""
    data: Any = trainer.train_dataset
    own = type(trainer).compute_loss.__module__.partition(".")[0]
    if own not in {"transformers", "trl"} or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return {}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        # Do the same as the trainer's loader, without making another: the accelerator stores each that it prepares.
        if hasattr(data, "remove_columns"):
            data, collate = trainer._remove_unused_columns(data, "training"), trainer.data_collator  # noqa: SLF001
        else:
            collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")  # noqa: SLF001
        batch = collate([data[0]])
    except Exception:  # data and collators may raise anything; the training will raise a clearer error
        return {}
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    return batch if isinstance(batch, Mapping) else {}


def find_reference(trainer: Trainer, policies: Sequence[Policy]) -> nn.Module | None:
    """Return the reference model of a trl trainer, which runs each batch without gradient, if a policy acts on it."""
    from torch import nn

    # The attribute's name in DPO, GRPO, RLOO, KTO and others. None: they switch off the model's adapters instead.
    found = getattr(trainer, "ref_model", None)
    runs = any(find_facts(policy).get("runs_reference") for policy in policies)
    return found if runs and isinstance(found, nn.Module) and found is not trainer.model else None


def reads_loss_alone(trainer: Trainer) -> bool:
    """Return whether a trainer's evaluation reads only the loss among the model's outputs, according to its class and
    arguments."""
    own = type(trainer).prediction_step.__module__.partition(".")[0]
    return trainer.compute_metrics is None and own in {"transformers", "trl"}


def pass_advantages(engine: Engine, trainer: object, policies: Sequence[Policy], inputs: Mapping[str, Any]) -> None:
    """Pass the advantages of a batch to the engine, so that a lossless policy skips examples with advantage zero."""
    advantages = find_advantages(trainer, policies, inputs)
    if advantages is not None:
        engine.columns(example_weight=advantages)


def find_advantages(trainer: object, policies: Sequence[Policy], inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the advantages of a batch in a trl trainer whose loss has no terms without them: no divergence from a
    reference and no entropy. Return None for other trainers, if no policy needs them, or if one chooses examples: then
    a lossless policy gets a part of the batch, which the advantages of all do not match."""
    runs = any(find_facts(policy).get("runs_reference") for policy in policies)
    if not runs or any(kind.weighs_examples for kind in list_kinds(policies)):
        return None
    advantages = inputs.get("advantages") if isinstance(inputs, Mapping) else None
    adds = getattr(trainer, "beta", None) != 0.0 or getattr(trainer, "_entropy_bonus_enabled", True)
    return advantages if isinstance(advantages, Tensor) and not adds else None


def _sees_labels(policy: Policy) -> bool:
    """Return whether a policy needs only labels, so that the trainer may compute another loss than the model's."""
    return isinstance(policy, TokenSelector) and chooses_by_data(policy) and not policy.reads


def _describe(trainer: Trainer) -> Mapping[str, object]:
    args = trainer.args
    optim = str(args.optim)
    forwards = (module.__dict__.get("forward") for module in model_of(trainer).modules())
    return {
        "loop": "trainer",
        "deepspeed": bool(trainer.is_deepspeed_enabled),
        "fsdp": bool(trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled),
        "loaded_sharded": bool(getattr(trainer, "is_distributed_loading_by_transformers", False))
        or (getattr(trainer.model, "tp_size", 1) or 1) > 1,
        "parallelism": getattr(args, "parallelism_config", None) is not None,
        "model_parallel": bool(trainer.is_model_parallel),
        "data_parallel": args.n_gpu > 1,
        "liger": bool(args.use_liger_kernel),
        "lomo": optim if "lomo" in optim.lower() else None,
        "fused_head": any("fused_lm_head" in (getattr(f, "__kwdefaults__", None) or {}) for f in forwards),
        "torch_compile": bool(args.torch_compile),
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "neftune_noise_alpha": args.neftune_noise_alpha or None,
        "compute_loss_func": trainer.compute_loss_func is not None,
    }


IGNORED = -100  # a label that trains nothing, as in transformers


def pass_columns(
    engine: Engine,
    policies: Sequence[Policy],
    inputs: Mapping[str, Any],
    num_candidates: Tensor | int | None = None,
    *,
    removes: bool = False,
) -> None:
    """Pass the columns of a batch that policies read to the engine, before ``compute_loss`` removes any.
    ``num_candidates`` is the number of candidates in the whole step, None if all targets are candidates. ``removes``:
    the trainer drops unknown columns. Raise UsageError if it dropped one that a policy reads."""
    policy = _selector(policies)
    if policy is None:
        return
    missing = sorted(policy.reads - set(inputs))
    if missing and removes:
        raise UsageError(
            f"{type(policy).__name__} needs the column {missing[0]!r}, which the batch does not have: set "
            "TrainingArguments(remove_unused_columns=False), which keeps columns that the model does not use"
        )
    names = policy.reads | ({"labels"} if chooses_by_data(policy) else set())
    given = {name: inputs[name] for name in names if isinstance(inputs.get(name), Tensor)}
    found = mask_noncandidates(policies, [inputs])
    if num_candidates is not None and found is not None:
        # The engine multiplies this number by trained / targets of the batch. Change that to trained / candidates.
        targets, own = (batch["labels"][:, 1:].ne(IGNORED).sum() for batch in (inputs, found[0]))
        given["num_items_in_batch"] = num_candidates * (targets / own.clamp(min=1))
    engine.columns(**given)


def mask_noncandidates(policies: Sequence[Policy], batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return copies of batches in which only targets that the policy's data column marks as trainable have labels.
    Return None if all targets are trainable, or a batch lacks the column or labels."""
    policy = _selector(policies)
    name = None if policy is None else policy.candidate_column
    if name is None or not all(isinstance(batch.get(key), Tensor) for batch in batches for key in (name, "labels")):
        return None
    return [{**batch, "labels": batch["labels"].masked_fill(batch[name] == 0, IGNORED)} for batch in batches]


def _selector(policies: Sequence[Policy]) -> TokenSelector | None:
    return next((policy for policy in policies if isinstance(policy, TokenSelector)), None)


def chooses_by_data(policy: TokenSelector) -> bool:
    """Return whether the data alone mark trained tokens, so that a user's own loss can count the same tokens. If the
    policy selects tokens, only the model's own loss counts the right ones."""
    shares = (policy.budget, getattr(policy, "keep", None))  # a plug-in's policy may lack keep
    return not policy.needs and all(share in (None, 1.0) for share in shares)
