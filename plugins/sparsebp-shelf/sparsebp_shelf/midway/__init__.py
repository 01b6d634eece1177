"""Choosing examples behind the first layers of the forward of training, and running the others no further."""

from sparsebp_shelf.midway.kind import MIDWAY_SELECTOR, Features, MidwaySelector, ReadFeatures
from sparsebp_shelf.midway.partial_forward import PartialForward

__all__ = ["MIDWAY_SELECTOR", "Features", "MidwaySelector", "PartialForward", "ReadFeatures"]
