"""The conformance suite of batch packers."""

from __future__ import annotations

from collections.abc import Callable

from sparsebp_cli.policy import BatchPacker, PackedSize
from sparsebp_cli.testing.promise import name_of, require
from sparsebp_cli.testing.suite import check_repeatable

WHOLE = PackedSize(num_positions=1024, num_rows=1024, num_head_rows=1024)
SIZES = tuple(PackedSize(1024, rows, head) for rows in (1, 256, 1000, 1024) for head in (0, 16, 512, 1020, 1024))
SIZES += (PackedSize(1024, 1024, 1024, 1), PackedSize(1024, 512, 1024, 512))


def check_batch_packer(policy: BatchPacker) -> None:
    """Check a batch packer against every promise of the contract."""
    for check in _CHECKS:
        check(policy)


def _check_decision(policy: BatchPacker) -> None:
    for size in SIZES:
        decided = policy.packs(size)
        require(isinstance(decided, bool), f"{name_of(policy)}: packs must return True or False, got {decided!r}")
    require(not policy.packs(WHOLE), f"{name_of(policy)}: packs a batch in which nothing can be skipped")
    require(any(policy.packs(size) for size in SIZES), f"{name_of(policy)}: packs returns False for every batch")


def _pack(policy: BatchPacker, size: PackedSize) -> bool:
    return policy.packs(size)


def _check_repeatable(policy: BatchPacker) -> None:
    for size in SIZES:
        check_repeatable(policy, _pack, size)


_CHECKS: tuple[Callable[[BatchPacker], None], ...] = (_check_decision, _check_repeatable)
