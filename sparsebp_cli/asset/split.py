"""Train/test split by the name of a row alone, independent of its order and of other rows."""

from __future__ import annotations

import hashlib


def is_held_out(name: str) -> bool:
    """Return whether a row belongs to the split ``test``, as about one in ten does. The answer is the same on every
    machine and Python version."""
    return hashlib.sha256(name.encode()).digest()[0] < 26  # 26 of 256
