"""A dense pass of the model under counters, and the share of its FLOPs that a policy claims to execute."""

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
    """A counted forward and backward of the model without policies."""

    loss: Tensor  # its graph exists, without the saved tensors
    trace: ModuleTrace
    flops: FlopCount


@dataclass(frozen=True)
class PassEstimate:
    """Shares of a dense pass's FLOPs that a policy claims to execute, by module; a module not listed keeps all.

    Shares of several policies are multiplied.
    """

    backward: Mapping[str, float] = field(default_factory=dict)  # in [0, 1]
    recomputed: Mapping[str, float] = field(default_factory=dict)  # of forwards repeated in the backward, in [0, 1]
    forward: Mapping[str, float] = field(default_factory=dict)  # from 0; may exceed 1
    # The same with counts rounded up to what can be computed; empty: no rounding.
    allowed_backward: Mapping[str, float] = field(default_factory=dict)
    allowed_recomputed: Mapping[str, float] = field(default_factory=dict)
