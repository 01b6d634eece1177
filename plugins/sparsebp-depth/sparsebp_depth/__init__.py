"""An example of a policy kind in a package: how many of the last layers have a backward at a step."""

from sparsebp_depth.kind import DEPTH_SELECTOR, DepthDraw, DepthSelector
from sparsebp_depth.policy import RandomDepth

__all__ = ["DEPTH_SELECTOR", "DepthDraw", "DepthSelector", "RandomDepth"]
