"""Provide optimizers of published methods, which the entry-point group ``sparsebp.optimizers`` lists.

Importing this package does not import torch.
"""

from __future__ import annotations

from sparsebp_cli.optimizers import OptimizerEntry

_PACKAGE = ("pytorch-optimizer", "optimizers")
_PROJECTED = ("betas", "eps", "weight_decay", "rank", "scale", "update_proj_gap")
GALORE = OptimizerEntry("sparsebp_shelf.optimizers.projection:GaLore", _PROJECTED, extra=_PACKAGE)
FIRA = OptimizerEntry("sparsebp_shelf.optimizers.projection:Fira", _PROJECTED, extra=_PACKAGE)
ADALOMO = OptimizerEntry(
    "sparsebp_shelf.optimizers.adalomo:AdaLomo",
    ("weight_decay", "clip_threshold", "decay_rate", "eps1", "eps2"),
    extra=_PACKAGE,
)
_ADAMW = ("betas", "eps", "weight_decay")
LORA_FA = OptimizerEntry("sparsebp_shelf.optimizers.lora_fa:LoRAFA", _ADAMW, takes_model=True, of_adapters=True)
COMPACT = OptimizerEntry("sparsebp_shelf.optimizers.compact:CompActAdamW", _ADAMW, of_projections=True)
