"""PUBLIC. Traces the memory of a training step: live bytes over time, split by purpose."""

from sparsebp_tools.memory.curve import MemoryCurve, MemoryPoint, MemorySplit
from sparsebp_tools.memory.trace import MemoryTrace, memory_trace

__all__ = ["MemoryCurve", "MemoryPoint", "MemorySplit", "MemoryTrace", "memory_trace"]
