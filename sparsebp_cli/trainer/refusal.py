"""What of a ``transformers.Trainer`` does not go together with the engine, refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import Trainer


def refuse_unbuilt(trainer: Trainer) -> None:
    """Refuse what the engine cannot be carried through.

    Args:
        trainer: Just made.

    Raises:
        UnsupportedError: The first thing found.
    """
    for found, what in _find(trainer):
        if found:
            raise UnsupportedError(f"policies in a transformers.Trainer are not built with {what}")


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
