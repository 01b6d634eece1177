"""Define the policy kind that skips tiles of attention in the backward.

Shape letters: H heads, Q tiles of queries, K tiles of keys.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.policy import Kind, Policy, Step, rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionTiles:
    """The attention of one module for one example, cut into square tiles of queries and keys.

    Args:
        module: The module's name in the model, such as ``model.layers.3.self_attn``.
        layer: Number of its layer, from 0, encoder layers before decoder layers; None outside of layers.
        example: Number of the example in the micro-batch, from 0.
    """

    module: str
    layer: int | None
    example: int

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(tiles)``."""
        return f"{self.module}/example {self.example}"


class TileSelector(Policy):
    """Skip tiles of attention in the backward; the forward is bit-identical to the dense one.

    A skipped tile adds nothing to the gradients of queries, keys and values. The gradient of softmax subtracts a sum
    over keys from each row. That sum still covers all keys, since it is known from the output. A policy that skips
    anything is neither exact nor unbiased, unless its draw corrects for it.
    """

    @property
    @abstractmethod
    def tile_size(self) -> int:
        """Number of queries and keys of a tile, at least 1; the last tiles of a sequence may have fewer."""

    @abstractmethod
    def select(self, mass_HQK: torch.Tensor, tiles: AttentionTiles, step: Step) -> torch.Tensor:
        """Choose the tiles that have a backward; not called if the policy is exact.

        Args:
            mass_HQK: Sum of the attention weights in each tile, float32 or wider; the tiles of one tile of queries add
                up to its number of queries. 0 if the mask excludes the whole tile, which then has no backward.
            tiles: Module and example of the attention.
            step: The step of the decision; ``step.generator(tiles, mass_HQK.device)`` is the only source of randomness
                allowed.

        Returns:
            Which tiles are kept, bool, (H, Q, K).
        """


TILE_SELECTOR = Kind(
    TileSelector,
    asked="Decides in the backward, example by example, by the attention weights in each tile. Exact if "
    "every tile has a backward. Claims no FLOPs beforehand, since they depend on the weights; the run counts them. "
    "[Skip tiles of attention](../guide/blocks.md#skip-tiles-of-attention)\n",
    extensions=((1_000, "sparsebp_shelf.tile.extension:TileExtension"),),
    suite="sparsebp_shelf.tile.suite:check_tile_selector",
    keeps_state=False,
    limits=(
        rule.not_beside(
            ("EdgeRouter", "TokenSelector", "BatchPacker", "TokenRouter"),
            "Tiles are those of an example's positions, and rows that are left out, packed or routed have others.",
        ),
        rule.at_linears("Nodes are those of the model's backward."),
        rule.Rule(
            "{policy} needs {attention:sdpa}, got {attention:=}",
            why="Eager attention keeps its weights for the backward, where tiles would be computed again.",
            options={"attention": ("eager",)},
        ),
    ),
)
