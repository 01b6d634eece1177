"""What autograd's graph looks like, found by walking it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def count_nodes(loss: Tensor) -> int:
    """Return how many nodes run in the backward pass of a loss; versions of PyTorch differ by one or two."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return len(seen)
