"""Steps on tensors without data: what they would keep in memory, at any size, on a machine that could not hold them."""

from sparsebp_tools.forecast.fake.mode import StandIns, pretend
from sparsebp_tools.forecast.fake.record import FakeRecord

__all__ = ["FakeRecord", "StandIns", "pretend"]
