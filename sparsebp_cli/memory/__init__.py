"""PUBLIC. Traces the memory of a training step: live bytes over time, split by purpose."""

from sparsebp_cli.memory.trace import MemoryTrace, memory_trace

__all__ = ["MemoryTrace", "memory_trace"]
