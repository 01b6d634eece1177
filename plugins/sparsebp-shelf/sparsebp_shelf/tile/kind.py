"""The kind of policy that skips tiles of attention in the backward.

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
        layer: Number of the layer that it belongs to, from 0, an encoder's before a decoder's; None outside of layers.
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
    """Skips tiles of attention in the backward; the forward is the dense one, to the last bit.

    A skipped tile adds nothing to the gradients of queries, keys and values. The sum over keys that the gradient of
    softmax subtracts from each row stays that of all keys, since it is known from the output. A policy that skips
    anything is neither exact nor unbiased, unless what it draws makes up for it.
    """

    @property
    @abstractmethod
    def tile_size(self) -> int:
        """Queries and keys of a tile, at least 1; the last tiles of a sequence may have fewer."""

    @abstractmethod
    def select(self, mass_HQK: torch.Tensor, tiles: AttentionTiles, step: Step) -> torch.Tensor:
        """Choose the tiles that have a backward; not asked where the policy is exact.

        Args:
            mass_HQK: Sum of the attention weights in each tile, float32 or wider; those of a tile of queries add up to
                its number of queries. 0 where the mask excludes the whole tile, which then has no backward.
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
        rule.at_linears(
            "Branches run attention again for the rows that they keep, and nodes are those of the model's backward."
        ),
        rule.Rule(
            "{policy} needs {attention:sdpa}, got {attention:=}",
            why="Eager attention keeps its weights for the backward, where tiles would be computed again.",
            options={"attention": ("eager",)},
        ),
    ),
)
