"""Choose examples after the first layers of the training forward, and stop the others there."""

from sparsebp_shelf.midway.kind import MIDWAY_SELECTOR, Features, MidwaySelector, ReadFeatures
from sparsebp_shelf.midway.partial_forward import PartialForward

__all__ = ["MIDWAY_SELECTOR", "Features", "MidwaySelector", "PartialForward", "ReadFeatures"]
