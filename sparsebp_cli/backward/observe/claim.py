"""A dense pass of the model under counters, and the share of its FLOPs that a policy claims to leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.backward.observe.flops import FlopCount
    from sparsebp_cli.backward.observe.module_trace import ModuleTrace


@dataclass(frozen=True)
class DensePass:
    """A forward and backward pass of the model without policies, under counters.

    Args:
        loss: That was differentiated; its graph is there, what it saved is not.
        trace: Knows which module made a node of the graph.
        flops: What was executed, by module.
    """

    loss: Tensor
    trace: ModuleTrace
    flops: FlopCount


@dataclass(frozen=True)
class PassEstimate:
    """Which share of a dense pass's FLOPs a policy claims to leave, by module; a module that is not named keeps all.

    Shares of several policies are multiplied.

    Args:
        backward: Of the backward, in [0, 1].
        recomputed: Of forwards that run again inside the backward, in [0, 1].
        forward: Of the forward, from 0.
        allowed_backward: As ``backward``, with counts rounded up to what can be computed; empty: the same.
        allowed_recomputed: As ``recomputed``, the same way.
    """

    backward: Mapping[str, float] = field(default_factory=dict)
    recomputed: Mapping[str, float] = field(default_factory=dict)
    forward: Mapping[str, float] = field(default_factory=dict)
    allowed_backward: Mapping[str, float] = field(default_factory=dict)
    allowed_recomputed: Mapping[str, float] = field(default_factory=dict)
