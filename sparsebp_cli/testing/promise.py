"""Helpers of the conformance suites of all kinds of policies."""

from __future__ import annotations

import random
from typing import TypeVar

import torch
from torch import Tensor

from sparsebp_cli.policy import Policy

Kind = TypeVar("Kind", bound=Policy)


def require(condition: bool, text: str) -> None:
    """Raise ``AssertionError`` with a text unless a condition holds."""
    if not condition:
        raise AssertionError(text)


def name_of(policy: Policy) -> str:
    """Return a policy's class and options as a constructor call."""
    return f"{type(policy).__name__}({', '.join(f'{k}={v!r}' for k, v in policy)})"


def through_json(policy: Kind) -> Kind:
    """Return a policy after conversion to JSON and back, as a plan transfers it."""
    return type(policy).model_validate_json(policy.model_dump_json())


def random_states() -> tuple[object, ...]:
    """Return the states of the global random generators."""
    import numpy as np

    return torch.get_rng_state().tolist(), repr(np.random.get_state(legacy=False)), random.getstate()


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors are equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
