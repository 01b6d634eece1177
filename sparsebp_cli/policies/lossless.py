"""The same gradient with less work: no row of a batch is computed that no loss needs.

Leaving out padding (Jinle Zeng et al., "Boosting Distributed Training Performance of the Unpadded BERT Model" (2022),
https://arxiv.org/abs/2208.08124) and computing a shared prompt once (Franz Louis Cesista et al. and others call it
shared-prefix or tree attention) are known from single trainers and kernels. We differ: both work together, with the
head's rows, in any loop and by the model's own attention, and the gradient is compared with the plain one.
"""

from __future__ import annotations

from typing import final

from sparsebp_cli.policy import BatchPacker, PackedSize

# Packing copies rows, which costs about as much as 1 % of a step of a 23M llama on two CPU cores (2026-11-22).
MIN_SAVED = 0.02
HEAD_SHARE = 0.1  # of a step: about that of the head in a small model, less in a large one


@final
class Lossless(BatchPacker):
    """Leave out padding, repeated prefixes and positions without a label; the gradient is the dense one."""

    def packs(self, size: PackedSize) -> bool:
        layers = 1 - size.num_rows / size.num_positions
        head = 1 - size.num_head_rows / size.num_positions
        return layers + HEAD_SHARE * head >= MIN_SAVED
