"""The optimizers that a recipe can name: where each is, which arguments it takes, and what it goes with.

The arguments are written down, so that a recipe is checked without torch; a test holds them against the optimizers'
signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_EXTRA = ("pytorch-optimizer", "optimizers")


@dataclass(frozen=True)
class OptimizerEntry:
    """One optimizer.

    Args:
        place: ``module:class``.
        arguments: Names that ``training.optim_args`` may give.
        implied: Arguments that its name says beside the class.
        extra: Package and extra that it needs; None: it is there.
        is_sharded: Whether its state goes with weights that are cut into parts.
    """

    place: str
    arguments: tuple[str, ...]
    implied: Mapping[str, object] = field(default_factory=dict)
    extra: tuple[str, str] | None = None
    is_sharded: bool = False


def _torch(name: str, arguments: str, *, is_sharded: bool = True) -> OptimizerEntry:
    """All classes of torch.optim have these in common; all but SGD have eps as well."""
    common = ("weight_decay", "maximize", "foreach", *(("eps",) if name != "SGD" else ()))
    return OptimizerEntry(f"torch.optim:{name}", (*arguments.split(), *common), is_sharded=is_sharded)


def _apollo(**implied: object) -> OptimizerEntry:
    names = ("betas", "eps", "weight_decay", "rank", "scale", "scale_type", "update_proj_gap", "seed")
    return OptimizerEntry("sparsebp_cli.worker.apollo:Apollo", names, implied)


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adafactor": _torch("Adafactor", "beta2_decay d", is_sharded=False),
    "adagrad": _torch("Adagrad", "lr_decay initial_accumulator_value differentiable fused", is_sharded=False),
    "adam": _torch("Adam", "betas amsgrad capturable differentiable fused decoupled_weight_decay"),
    "adamax": _torch("Adamax", "betas capturable differentiable"),
    "adamw": _torch("AdamW", "betas amsgrad capturable differentiable fused"),
    "nadam": _torch("NAdam", "betas momentum_decay decoupled_weight_decay capturable differentiable"),
    "radam": _torch("RAdam", "betas decoupled_weight_decay capturable differentiable"),
    "rmsprop": _torch("RMSprop", "alpha momentum centered capturable differentiable"),
    "sgd": _torch("SGD", "momentum dampening nesterov differentiable fused"),
    "apollo": _apollo(scale_type="channel"),
    # The paper's: rank 1, and a factor of the root of 128.
    "apollo-mini": _apollo(scale_type="tensor", rank=1, scale=128.0),
    "galore": OptimizerEntry(
        "sparsebp_cli.worker.galore:GaLore",
        ("betas", "eps", "weight_decay", "rank", "scale", "update_proj_gap"),
        extra=_EXTRA,
    ),
    "adalomo": OptimizerEntry(
        "sparsebp_cli.worker.adalomo:AdaLomo",
        ("weight_decay", "clip_threshold", "decay_rate", "eps1", "eps2"),
        extra=_EXTRA,
    ),
}
