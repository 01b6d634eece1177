"""Compute the same gradient with less work: skip token positions that no loss needs.

Some trainers and kernels have padding-free batches, or compute a shared prompt once for several completions. We differ:
both work together, also skip rows of the head, and work in any loop with the model's own attention. The engine compares
the gradient with the plain one.
"""

from __future__ import annotations

from typing import ClassVar, final

from sparsebp_cli.policy import BatchPacker, MethodCard, PackedSize

# Packing copies rows, so smaller savings do not pay off. The value is a guess, not measured.
MIN_SAVED = 0.02


@final
class Lossless(BatchPacker):
    """Skip padding, repeated prefixes and positions without a label; the gradient equals the dense one."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="First of all, if batches have padding, prompts without labels, or shared prefixes. It saves nothing "
        "on packed texts whose every position is trained.",
        saves=("time", "memory"),
        work="computed",
        memory="The rows that are computed.",
        measured="1.28 to 3.05 times as fast on batches with padding, prompts or shared prefixes; 1.33 against "
        "dense's 1.55 test loss at equal cost (results, measurements; guide, study).",
    )

    def packs(self, size: PackedSize) -> bool:
        last_rows = size.num_rows if size.num_last_rows is None else size.num_last_rows
        layers = (1 - size.head_share) * (size.num_positions - size.num_rows)
        last = size.last_share * (size.num_rows - last_rows)
        head = size.head_share * (size.num_positions - size.num_head_rows)
        return layers + last + head >= MIN_SAVED * size.num_positions
