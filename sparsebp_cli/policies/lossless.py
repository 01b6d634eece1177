"""Compute the same gradient with less work: skip token positions that no loss needs.

Some trainers and kernels skip padding, or compute a shared prompt once for several completions. We differ: we do both
together, skip rows of the head as well, and work in any training loop with the model's own attention. The engine
compares the gradient with that of an ordinary backward pass.
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
        use="Try this policy first if batches have padding, prompts without labels, or shared prefixes. It saves "
        "nothing if batches are packed texts with a label at every position.",
        saves=("time", "memory"),
        work="computed",
        memory="Only the token positions that are not skipped.",
        measured="1.28 to 3.05 times as fast on batches with padding, prompts or shared prefixes. Test loss at equal "
        "cost: 1.33; with dense training: 1.55 (results, measurements; guide, study).",
    )

    def packs(self, size: PackedSize) -> bool:
        last_rows = size.num_rows if size.num_last_rows is None else size.num_last_rows
        layers = (1 - size.head_share) * (size.num_positions - size.num_rows)
        last = size.last_share * (size.num_rows - last_rows)
        head = size.head_share * (size.num_positions - size.num_head_rows)
        return layers + last + head >= MIN_SAVED * size.num_positions
