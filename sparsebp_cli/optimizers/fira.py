"""Fira of the package pytorch-optimizer, with a state that can be saved.

Xi Chen, Kaituo Feng, Changsheng Li, Xunhao Lai, Xiangyu Yue, Ye Yuan, Guoren Wang: Fira: Can We Achieve Full-rank
Training of LLMs Under Low-rank Constraint?, 2024, https://arxiv.org/abs/2410.01623. With R the gradient G in the
subspace P and psi(R) its step by Adam, a matrix moves by scale P psi(R) + s (G - scale P R): the part of G outside of
the subspace is scaled, row by row or column by column, as Adam scales the part inside of it, s = |psi(R)| / |R|. The
norm of the second term grows by 1 % a step at most.
"""

from __future__ import annotations

import pytorch_optimizer
from torch.optim.optimizer import ParamsT

from sparsebp_cli.optimizers.projection import SavedProjections


class Fira(SavedProjections, pytorch_optimizer.Fira):  # type: ignore[misc]
    """AdamW in the subspace of each matrix's largest singular vectors, the rest of the gradient scaled likewise; AdamW
    for all that is no matrix.

    Args:
        params: Parameters or groups of them, as for a class of torch.optim.
        lr: Learning rate, 0 or more.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW; 0 or more.
        rank: Singular vectors that are kept.
        scale: Factor of the step in the subspace.
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
        pytorch_optimizer.Fira.__init__(self, params, lr, betas, weight_decay, eps, foreach=False, **projection)
        self.save_projections()
