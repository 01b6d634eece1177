"""GaLore of the package pytorch-optimizer, with a state that can be saved.

Zhao, Zhang, Chen, Wang, Anandkumar, Tian: GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024,
https://arxiv.org/abs/2403.03507.
"""

from __future__ import annotations

import pytorch_optimizer
from torch.optim.optimizer import ParamsT

from sparsebp_cli.optimizers.projection import SavedProjections


class GaLore(SavedProjections, pytorch_optimizer.GaLore):  # type: ignore[misc]
    """AdamW in the subspace of each matrix's largest singular vectors; AdamW for all that is no matrix.

    Args:
        params: Parameters or groups of them, as for a class of torch.optim.
        lr: Learning rate, 0 or more.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW; 0 or more.
        rank: Singular vectors that are kept.
        scale: Factor of matrices' steps.
        update_proj_gap: Steps for which a subspace is used.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int = 128,
        scale: float = 0.25,
        update_proj_gap: int = 200,
    ) -> None:
        # One tensor at a time: with several, the package computes the same in another form.
        projection = {"rank": rank, "scale": scale, "update_proj_gap": update_proj_gap, "projection_type": "std"}
        pytorch_optimizer.GaLore.__init__(self, params, lr, betas, weight_decay, eps, foreach=False, **projection)
        self.save_projections()
