"""Drop residual blocks from the backward, or from forward and backward."""

from sparsebp_shelf.block.dropbp import DropBP
from sparsebp_shelf.block.kind import BLOCK_DROPPER, BlockDropper, BlockGradient, DropDraw, ResidualBlock
from sparsebp_shelf.block.layerdrop import LayerDrop
from sparsebp_shelf.block.lcsb import LCSB
from sparsebp_shelf.block.pld import PLD

__all__ = [
    "BLOCK_DROPPER",
    "LCSB",
    "PLD",
    "BlockDropper",
    "BlockGradient",
    "DropBP",
    "DropDraw",
    "LayerDrop",
    "ResidualBlock",
]
