"""PUBLIC. The entry of an optimizer, and those that ship, as the group ``sparsebp.optimizers`` names them.

Of PyTorch's own, those are listed whose state can be cut into parts; the others are found by their names alone.
Importing this package does not import torch.
"""

from __future__ import annotations

from sparsebp_cli.composition.optimizer import OptimizerEntry, find_in_torch

__all__ = ["OptimizerEntry"]
_PACKAGE = ("pytorch-optimizer", "optimizers")


def _apollo(**implied: object) -> OptimizerEntry:
    names = ("betas", "eps", "weight_decay", "rank", "scale", "scale_type", "update_proj_gap", "seed")
    return OptimizerEntry("sparsebp_cli.optimizers.apollo:Apollo", names, implied)


ADAM, ADAMAX, ADAMW, NADAM, RADAM, RMSPROP, SGD = (
    find_in_torch(name, is_sharded=True) for name in ("adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "sgd")
)
APOLLO = _apollo(scale_type="channel")
APOLLO_MINI = _apollo(scale_type="tensor", rank=1, scale=128.0)  # the paper's: rank 1, a factor of the root of 128
_PROJECTED = ("betas", "eps", "weight_decay", "rank", "scale", "update_proj_gap")
GALORE = OptimizerEntry("sparsebp_cli.optimizers.projection:GaLore", _PROJECTED, extra=_PACKAGE)
FIRA = OptimizerEntry("sparsebp_cli.optimizers.projection:Fira", _PROJECTED, extra=_PACKAGE)
ADALOMO = OptimizerEntry(
    "sparsebp_cli.optimizers.adalomo:AdaLomo",
    ("weight_decay", "clip_threshold", "decay_rate", "eps1", "eps2"),
    extra=_PACKAGE,
)
_ADAMW = ("betas", "eps", "weight_decay")
LORA_FA = OptimizerEntry("sparsebp_cli.optimizers.lora_fa:LoRAFA", _ADAMW, takes_model=True, of_adapters=True)
COMPACT = OptimizerEntry("sparsebp_cli.optimizers.compact:CompActAdamW", _ADAMW, of_projections=True)
MUON = OptimizerEntry(
    "sparsebp_cli.optimizers.muon:MuonAdamW",
    (*_ADAMW, "momentum", "nesterov", "ns_steps"),
    takes_model=True,
)
