"""Gradient selectors that also choose among examples at the output of each layer, for all that lies below.

Shape letters: B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import GIVEN, AllBut, Conditions, Rule, not_compiled

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy.contract import Step


@dataclass(frozen=True)
class LayerOutput:
    """The output of a layer, at which the gradient comes in from above.

    Args:
        layer: Number of the layer, from 0.
        num_layers: Number of layers of the model.
    """

    layer: int
    num_layers: int

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(output, device)``."""
        return f"output of layer {self.layer}"


class LayerSampler(ABC):
    """A gradient selector that chooses examples at the output of each layer: derive from this class and from the kind.

    The gradient of an example that is left out is zero there, and so everywhere below: in this layer and in those
    before it. The engine multiplies; the linears below see the rows of zeros and may skip them.
    """

    @abstractmethod
    def sample(self, norm_B: Tensor, output: LayerOutput, step: Step) -> Tensor | None:
        """Return the factor of each example's gradient.

        Args:
            norm_B: 2-norm of each example's gradient, in float32 at least; 0 for those that were left out above.
            output: The layer at whose output the gradient has arrived.
            step: The step of the decision, with the state; ``step.generator(output, norm_B.device)`` is the only source
                of randomness allowed.

        Returns:
            (B,), 0 for those that are left out; None leaves the gradient as it is.
        """


_OF: Conditions = {"samples_layers": (True,)}
LAYER_SAMPLER = Kind(
    LayerSampler,
    extensions=((700, "sparsebp_cli.backward.kind.layer_sampler:LayerExtension"),),
    fact="samples_layers",
    limits=(
        Rule(
            "{policy} chooses examples at the output of each layer, which is not built with {other}",
            why="Each row of a gradient must belong to a known example, and each linear's input be there.",
            policy=_OF,
            other={"kind": AllBut(("GradientSelector", "ParameterSelector"))},
        ),
        Rule(
            "{policy} chooses examples at the output of each layer, which is not built with {segments}",
            policy=_OF,
            options={"segments": GIVEN},
        ),
        not_compiled("it chooses other examples at each layer and step", facts=_OF),
    ),
)
