"""Gradient selectors that receive more than the gradient, or select dgrad and wgrad separately.

wgrad, the gradient of a linear's weight, is a sum over rows. dgrad, the gradient of its input, is a sum over features.
The best estimate of each keeps the largest *products* of both factors. So the policy needs the norms of input and
weight, and a separate selection for each sum.

Shape letters: N rows (= B*T), O output width, D input width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.contract import GradientSelector, Site, Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import GIVEN, Conditions, at_linears, not_with, whole_weights

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy.selection import Selection, Split

Reading = Literal["input", "input_norm", "weight_norm"]


@dataclass(frozen=True)
class Seen:
    """The gradient of one linear's output, with the input or norms that the policy names in ``reads``. All norms are
    2-norms, in float32 at least.

    Args:
        grad_NO: Gradient of the output. It must not be changed.
        needs_dgrad: Whether the backward needs the gradient of the input.
        needs_wgrad: Whether the backward needs the gradient of the weight.
        readings: Tensors by the names in the policy's ``reads``. Properties of the same names return them.
    """

    grad_NO: Tensor
    needs_dgrad: bool = True
    needs_wgrad: bool = True
    readings: Mapping[Reading, Tensor] = field(default_factory=dict)

    @property
    def input(self) -> Tensor:
        """The linear's input, (N, D). It must not be changed."""
        return self._read("input")

    @property
    def input_norm(self) -> Tensor:
        """Norm of each row of the input, (N,). Linears that read one tensor share the computation."""
        return self._read("input_norm")

    @property
    def weight_norm(self) -> Tensor:
        """Norm of the weights of each output feature, (O,)."""
        return self._read("weight_norm")

    def _read(self, name: Reading) -> Tensor:
        if name not in self.readings:
            raise UsageError(f"{name} was not requested: add this name to the policy's property 'reads'")
        return self.readings[name]


class SplitTypes(NamedTuple):
    """The types of selection for dgrad and wgrad; None is dense."""

    dgrad: type[Selection] | None
    wgrad: type[Selection] | None


class InformedSelector(GradientSelector):
    """A gradient selector that receives a :class:`Seen`, and may select dgrad and wgrad separately.

    It works at ``sites: linears``. If it selects separately, ``split`` names both types, and ``selection`` names the
    type for wgrad.
    """

    @property
    def reads(self) -> frozenset[Reading]:
        """Names of the tensors that the policy needs besides the gradient. The engine computes no others."""
        return frozenset()

    @property
    def split(self) -> SplitTypes | None:
        """The types in the :class:`Split` that ``choose`` returns with these options; None without a ``Split``."""
        return None

    @abstractmethod
    def choose(self, seen: Seen, site: Site, step: Step) -> Selection | Split | None:
        """Select the part of the gradient that is kept, by the rules of :meth:`GradientSelector.select`.

        Args:
            seen: The gradient, and the tensors that ``reads`` names.
            site: The linear that computed the output.
            step: The step and call of the decision, and the only source of randomness.

        Returns:
            One selection for both products, or a :class:`Split`; None keeps everything.
        """

    @final
    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:  # noqa: ARG002
        """Refuse: the engine calls :meth:`choose`.

        Args:
            grad_NO: Unused.
            site: Unused.
            step: Unused.

        Returns:
            Nothing.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{type(self).__name__} needs more than the gradient: call choose instead of select")


_OF: Conditions = {"kind": ("GradientSelector",), "informed": (True,)}
INFORMED_SELECTOR = Kind(
    InformedSelector,
    fact="informed",
    limits=(
        at_linears(does=" reads inputs and weights of linears:", facts=_OF),
        not_with("float8", GIVEN, "it reads inputs and weights, or selects separately for dgrad and wgrad", facts=_OF),
        whole_weights("it needs each weight whole", facts=_OF),
    ),
)
