"""Define gradient selectors that also choose among examples at the output of each layer, for all layers below.

Shape letters: B examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.policy import Kind, rule

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import Step


@dataclass(frozen=True)
class LayerOutput:
    """The output of a layer at which a ``LayerSampler`` chooses examples.

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
    """Choose examples at the output of each layer; derive from this class and from a gradient selector's kind.

    The gradient of an example that is left out is zero at this output, and so in this layer and all layers below. The
    engine multiplies by the factors; the linears below see rows of zeros and may skip them.
    """

    @abstractmethod
    def sample(self, norm_B: Tensor, output: LayerOutput, step: Step) -> Tensor | None:
        """Return the factor of each example's gradient.

        Args:
            norm_B: 2-norm of each example's gradient, in float32 or wider; 0 for examples that a layer above left out.
            output: The layer at whose output the gradient has arrived.
            step: The step of the decision, with the state; ``step.generator(output, norm_B.device)`` is the only source
                of randomness allowed.

        Returns:
            (B,), 0 for examples that are left out; None leaves the gradient unchanged.
        """


_OF: rule.Conditions = {"samples_layers": (True,)}
LAYER_SAMPLER = Kind(
    LayerSampler,
    extensions=((700, "sparsebp_shelf.layer_sampler.extension:LayerExtension"),),
    fact="samples_layers",
    makes_trials=True,
    limits=(
        rule.Rule(
            "{policy} chooses examples at the output of each layer, which is not supported with {other}",
            why="The layer sampler needs the example of each gradient row, and the input of each linear layer.",
            policy=_OF,
            other={"kind": rule.AllBut(("GradientSelector", "ParameterSelector"))},
        ),
        rule.Rule(
            "{policy} chooses examples at the output of each layer, which is not supported with {segments}",
            policy=_OF,
            options={"segments": rule.GIVEN},
        ),
        rule.not_compiled("it chooses different examples at each layer and step", facts=_OF),
    ),
)
