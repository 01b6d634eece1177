"""Skip tiles of attention in the backward."""

from sparsebp_shelf.tile.backlite import BackLite
from sparsebp_shelf.tile.kind import TILE_SELECTOR, AttentionTiles, TileSelector

__all__ = ["TILE_SELECTOR", "AttentionTiles", "BackLite", "TileSelector"]
