"""Checks of a ``transformers.Trainer`` against the table of supported combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparsebp_cli.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.policy import Policy, TokenSelector
from sparsebp_cli.trainer.batch_column import chooses_by_data

if TYPE_CHECKING:
    from transformers import Trainer


def refuse_unsupported(trainer: Trainer, policies: Sequence[Policy] = ()) -> None:
    """Raise UnsupportedError for the first thing in a trainer that the engine does not support with these policies."""
    pairs = [(PolicyFacts.of(policy), _sees_labels(policy)) for policy in policies]
    facts = [replace(found, facts={**found.facts, "sees_labels": sees}) for found, sees in pairs]
    options = _describe(trainer)
    refuse(Setup(facts, options, words={"lomo": f"optim={options['lomo']!r}"}))


def _sees_labels(policy: Policy) -> bool:
    """Return whether a policy receives all that it reads, so that another loss than the model's can be computed."""
    return isinstance(policy, TokenSelector) and chooses_by_data(policy) and not policy.reads


def _describe(trainer: Any) -> Mapping[str, object]:
    args = trainer.args
    optim = str(args.optim)
    forwards = (module.__dict__.get("forward") for module in trainer.model.modules())
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
        "compute_loss_func": trainer.compute_loss_func is not None,
    }
