"""Run steps on tensors without data, to find their memory at any size, on machines that could not hold them."""

from sparsebp_tools.forecast.fake.mode import StandIns, pretend
from sparsebp_tools.forecast.fake.record import FakeRecord

__all__ = ["FakeRecord", "StandIns", "pretend"]
