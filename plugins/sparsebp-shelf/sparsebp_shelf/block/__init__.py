"""Drop residual blocks from the backward, or from forward and backward."""

from sparsebp_shelf.block.dropbp import DropBP
from sparsebp_shelf.block.kind import BLOCK_DROPPER, BlockDropper, DropDraw, ResidualBlock
from sparsebp_shelf.block.layerdrop import LayerDrop

__all__ = [
    "BLOCK_DROPPER",
    "BlockDropper",
    "DropBP",
    "DropDraw",
    "LayerDrop",
    "ResidualBlock",
]
