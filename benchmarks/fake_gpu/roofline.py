"""A model of an H100: the time of each operation from its counted bytes and FLOPs. Nothing here is measured.

An operation takes the longest of: its bytes at 85 % of 3.35 TB/s; its products at 70 % of 989 TFLOP/s, in whole waves
of tiles over 132 multiprocessors; and 3 microseconds. Sorting and top-k of many numbers read and write them several
times. Views are free. How fast Triton's products are is not known, so there are two assumptions: as fast as a
library's; or at 80 % of that rate and reading their tiles, again and again, from the second-level cache at 5.5 TB/s at
most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, equal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BANDWIDTH, CACHE_BANDWIDTH = 0.85 * 3.35e12, 5.5e12  # bytes a second
GEMM = 0.70 * 989e12  # FLOPs a second, bfloat16
SLOW_SHARE = 0.8  # of that rate, for Triton's products under the second assumption
ATTENTION_SHARE = 0.7  # of that rate, for fused attention
FLOAT32_SHARE = 0.5  # of that rate: TF32
LAUNCH, PROCESSORS = 3e-6, 132
PASSES = {"topk": 5, "sort": 16, "kthvalue": 5, "cumsum": 2}  # over the operand, beyond which they write their results
FREE = frozenset({
    "device", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "unbind", "empty", "new_empty", "empty_strided", "empty_like", "unfold",
    "split_with_sizes", "_reshape_alias", "lift_fresh", "record_stream", "_pin_memory",
})  # fmt: skip
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass
class Cost:
    """What some operations cost: counted, but for the seconds, which are modelled."""

    operations: int = 0
    bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    product_seconds: float = 0.0
    by_name: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, num_bytes: int, flops: float, seconds: float) -> None:
        """Count one operation."""
        self.operations, self.bytes, self.flops = self.operations + 1, self.bytes + num_bytes, self.flops + flops
        self.seconds += seconds
        self.product_seconds += seconds if flops else 0.0
        self.by_name[name] += 1

    def extended(self, larger: Cost, times: int) -> Cost:
        """Return this cost and ``times`` times what a larger model costs more."""
        made = Cost()
        for name in ("operations", "bytes", "flops", "seconds", "product_seconds"):
            mine = getattr(self, name)
            setattr(made, name, mine + times * (getattr(larger, name) - mine))
        return made


class Meter(TorchDispatchMode):
    """Costs every operation on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count it."""
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(found) if isinstance(value, Tensor)]
        if name not in FREE and any(tensor.is_cuda for tensor in (*given, *made)):
            num_bytes, flops = count_bytes(name, given, made), count_flops(name, given, made)
            self.cost.add(name, num_bytes, flops, estimate(name, num_bytes, flops, given, made))
        return found


@contextmanager
def metered() -> Iterator[Cost]:
    """Yield the cost of the operations of a block."""
    meter = Meter()
    with meter:
        yield meter.cost


def count_flops(name: str, given: list[Tensor], made: list[Tensor]) -> float:
    """Return the FLOPs of a product; 0 of other operations."""
    if name in PRODUCTS:
        left = given[-2]
        return 2.0 * made[0].numel() * left.shape[-1]
    if name in ("dgrad_of_rows", "wgrad_of_rows"):
        grad, other, index = given[:3]
        return 2.0 * index.numel() * grad.shape[1] * other.shape[1]
    if name in ("dgrad_of_blocks", "wgrad_of_blocks"):  # index, then one weight a block, if any
        return 2.0 * given[2].numel() * BLOCK[0] * BLOCK[1] * given[1].shape[1]
    if name.startswith("attend"):  # two products forward; five backward, with that of the scores again
        query, key = given[1:3] if name.endswith("backward") else given[:2]
        of_one = 2.0 * query.numel() * key.shape[-2] / (1 + _is_square(query, key))
        return of_one * (5 if name.endswith("backward") else 2)
    if name.startswith("_flash"):  # the same, for sequences by their ends
        query, ends = (given[1], given[6:8]) if name.endswith("backward") else (given[0], given[3:5])
        pairs = sum(math.prod(lengths) for lengths in zip(*(end.diff().tolist() for end in ends), strict=True))
        of_one = 2.0 * query[0].numel() * pairs / (1 + equal(*ends))
        return of_one * (5 if name.endswith("backward") else 2)
    return 0.0


def _is_square(query: Tensor, key: Tensor) -> bool:
    return query.shape[-2] == key.shape[-2]  # every query sees half of the keys, as in a decoder


IS_SLOW = [False]  # which of the assumptions about Triton's products holds
BLOCK = [32, 32]  # rows and features of the blocks that are being counted


def count_bytes(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    if name.startswith("attend"):  # what a kernel keeps for its own backward, a few bytes a row, is left out
        given, made = (given[:4], made) if name.endswith("backward") else (given, made[:1])
    sizes = [tensor.numel() * tensor.element_size() for tensor in given]
    results = sum(tensor.numel() * tensor.element_size() for tensor in made)
    if name == "dgrad_of_rows":  # the kept rows and the weight; zeros, then the rows that are kept
        share = given[2].numel() / max(1, len(given[0]))
        found = share * sizes[0] + sizes[1] + (1 + share) * results
    elif name == "wgrad_of_rows":
        found = given[2].numel() / max(1, len(given[0])) * (sizes[0] + sizes[1]) + results
    elif name.endswith("_of_blocks"):  # the kept blocks of the gradient, and all of the rest
        found = 2 * given[2].numel() * BLOCK[0] * BLOCK[1] + sizes[1] + results
    elif name in ("index_select", "gather", "index"):
        found = 2 * results + sum(sizes[1:])
    elif name in ("index_copy_", "index_copy", "scatter_", "index_add_"):
        found = sizes[1] + 2 * sizes[-1]
    elif name in ("copy_", "zero_", "fill_"):
        found = results + sum(sizes[1:])
    else:
        found = sum(sizes) + results + PASSES.get(name, 0) * (sizes[0] if sizes else 0)
    return int(found)


def estimate(name: str, num_bytes: int, flops: float, given: list[Tensor], made: list[Tensor]) -> float:
    """Return the modelled seconds of one operation."""
    seconds = max(LAUNCH, num_bytes / BANDWIDTH)
    if not flops:
        return seconds
    rate = 1.0 if made[0].element_size() == 2 else FLOAT32_SHARE
    if name.startswith(("attend", "_flash")):
        return max(seconds, flops / (rate * GEMM * ATTENTION_SHARE))
    if name in PRODUCTS:
        high, wide = made[0].shape[-2:]
        waste = min(waste_of_waves(high, wide, tile, made[0].numel() // max(1, high * wide)) for tile in TILES)
        return max(seconds, flops / (rate * GEMM) * waste)
    if name.endswith("blocks"):
        tile = (min(128, BLOCK[name.startswith("w")]), 128)
        waste = waste_of_waves(*made[0].shape, tile)
    else:
        from sparsebp_cli.policy.kernel.rows import find_tile

        kept = given[2].numel()
        chosen = find_tile(kept if name.startswith("d") else made[0].shape[0], made[0].shape[1], is_hopper=True)
        tile = chosen.high, chosen.wide
        waste = waste_of_waves(kept if name.startswith("d") else made[0].shape[0], made[0].shape[1], tile)
    products = flops / (rate * GEMM) * waste
    if not IS_SLOW[0]:
        return max(seconds, products)
    of_cache = flops / (2 * tile[0] * tile[1]) * sum(tile) * made[0].element_size()
    return max(seconds, products / SLOW_SHARE, of_cache / CACHE_BANDWIDTH * waste)


TILES = ((128, 256), (128, 128), (64, 128), (64, 64))  # a library chooses


def waste_of_waves(high: int, wide: int, tile: tuple[int, int], number: int = 1) -> float:
    """Return the time of whole waves of tiles over that of the tiles' own work."""
    tiles = number * math.ceil(high / tile[0]) * math.ceil(wide / tile[1])
    work = number * high * wide / (tile[0] * tile[1])
    return math.ceil(tiles / PROCESSORS) * PROCESSORS / work if work else 1.0
