"""Provide a target for SparseBP: managed jobs of SkyPilot, with a bucket as the run's folder."""

from sparsebp_sky.engine import SkyEngine, SkyTarget
from sparsebp_sky.option import SkyOptions

__all__ = ["SkyEngine", "SkyOptions", "SkyTarget"]
