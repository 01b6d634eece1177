"""What can be known to be missing before a model is changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import ExampleSelector, Policy, TokenSelector

BATCH = "batch"


def check_scoring(policies: Sequence[Policy], num_steps: int | None, reference: nn.Module | str | None) -> None:
    """Refuse a policy without what it chooses by, and a reference that nobody reads.

    Args:
        policies: All that are to be attached.
        num_steps: Optimizer steps of the whole training; None: nobody told.
        reference: A model; ``batch``: its scores come with each batch.

    Raises:
        UsageError: Something is missing, or given for nothing.
    """
    for policy in policies:
        if isinstance(policy, ExampleSelector) and policy.needs_num_steps and num_steps is None:
            name = type(policy).__name__
            raise UsageError(f"{name}: start and end are shares of the training: give attach(num_steps=...)")
    readers = [p for p in policies if isinstance(p, TokenSelector) and "reference_loss" in p.needs]
    if readers and reference is None:
        raise UsageError(
            f"{type(readers[0]).__name__} compares with a reference: give attach(reference=MODEL), or "
            f"reference={BATCH!r} where each batch has a column reference_loss"
        )
    if isinstance(reference, str) and reference != BATCH:
        raise UsageError(f"reference must be a model or {BATCH!r}, got {reference!r}")
    if reference is not None and not readers:
        raise UsageError("reference is given, and no policy compares with one")
