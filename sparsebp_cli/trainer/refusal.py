"""What of a ``transformers.Trainer`` does not go together with the engine, refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import ExampleSelector, Policy, TokenSelector
from sparsebp_cli.trainer.column import chooses_by_data

if TYPE_CHECKING:
    from transformers import Trainer


def refuse_unbuilt(trainer: Trainer, policies: Sequence[Policy] = ()) -> None:
    """Refuse what the engine cannot be carried through.

    Args:
        trainer: Just made.
        policies: That it is to have.

    Raises:
        UnsupportedError: The first thing found.
    """
    for found, what in _find(trainer):
        if found:
            raise UnsupportedError(f"policies in a transformers.Trainer are not built with {what}")
    for policy in policies:
        for found, what in _find_for(policy, trainer):
            if found:
                raise UnsupportedError(f"{type(policy).__name__} in a transformers.Trainer is not built with {what}")


def _find_for(policy: Policy, trainer: Any) -> Iterator[tuple[bool, str]]:
    """Find what does not go with one policy."""
    if not isinstance(policy, TokenSelector | ExampleSelector):
        return
    args = trainer.args
    fused = (module.__dict__.get("forward") for module in trainer.model.modules())
    yield (
        any("fused_lm_head" in (getattr(forward, "__kwdefaults__", None) or {}) for forward in fused),
        "trl's fused head: the trainer makes the loss out of the log-probabilities of all labels, whatever was chosen",
    )
    yield args.torch_compile, "torch_compile: what the forward computes differs from step to step"
    whole = "which reads the logits of all positions: let the model compute the loss"
    yield args.label_smoothing_factor != 0, f"label_smoothing_factor={args.label_smoothing_factor}, {whole}"
    knows = isinstance(policy, TokenSelector) and chooses_by_data(policy) and not policy.reads
    yield trainer.compute_loss_func is not None and not knows, f"compute_loss_func, {whole}, or override compute_loss"


def _find(trainer: Any) -> Iterator[tuple[bool, str]]:
    args = trainer.args
    yield trainer.is_deepspeed_enabled, "DeepSpeed: it runs the backward itself"
    yield trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled, "FSDP: it cuts the weights; DDP works"
    yield (
        getattr(trainer, "is_distributed_loading_by_transformers", False)
        or (getattr(trainer.model, "tp_size", 1) or 1) > 1,
        "a model that is sharded when it is loaded",
    )
    yield getattr(args, "parallelism_config", None) is not None, "parallelism_config: it cuts weights or sequences"
    yield trainer.is_model_parallel, "a model on several devices; DDP works"
    yield args.n_gpu > 1, "DataParallel over several devices in one process: start one process a device (DDP)"
    yield (
        args.use_liger_kernel,
        "use_liger_kernel: its fused loss computes the head's gradient in the forward, where nothing can be selected",
    )
    yield "lomo" in str(args.optim).lower(), f"optim={str(args.optim)!r}: it updates weights inside the backward"
