"""Forward ``memory_trace`` and ``MemoryTrace`` of 0.5 to the package ``sparsebp-tools``. The next release removes this
module."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.entry_point import import_moved

HOMES = dict.fromkeys(("MemoryTrace", "memory_trace"), "sparsebp_tools.memory")


def __getattr__(name: str) -> Any:
    return import_moved(__name__, name, HOMES)
