"""PUBLIC. What a training step holds in memory: a trace of allocations, told apart by what they are for."""

from sparsebp_cli.memory.trace import MemoryTrace, memory_trace

__all__ = ["MemoryTrace", "memory_trace"]
