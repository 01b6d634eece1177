"""Define the policy kind that chooses how many of the last layers have a backward at a step.

The backward ends at the input of the first of these layers: everything below has no gradient.
"""

from abc import abstractmethod
from dataclasses import dataclass

from sparsebp_cli.policy import Kind, Policy, Step, rule


@dataclass(frozen=True)
class DepthDraw:
    """Key of a policy's random numbers, once a step: ``step.generator(DepthDraw())``."""

    name: str = "depth"


class DepthSelector(Policy):
    """Choose how many of the last layers have a backward. No weight corrects for a layer that is left out, so a policy
    that leaves any out is neither exact nor unbiased."""

    @property
    def unbiased(self) -> bool:
        return self.exact

    @abstractmethod
    def depth(self, num_layers: int, step: Step) -> int:
        """Return the number of layers with a backward.

        Args:
            num_layers: Number of layers of the model, at least 1.
            step: The step of the decision; ``step.generator(DepthDraw())`` is the only source of randomness allowed.
                Micro-batch, call, draw and rank are 0: one choice holds for the whole step, and in every probe.

        Returns:
            From 1 to ``num_layers``, which is dense.
        """


DEPTH_SELECTOR = Kind(
    DepthSelector,
    asked="The policy decides at the start of each step. Exact if all layers have a backward at every step, else "
    "biased.",
    extensions=((Kind.OF_PACKAGES, "sparsebp_depth.extension:DepthExtension"),),
    suite="sparsebp_depth.suite:check_depth_selector",
    leaves_out_gradients=True,
    keeps_state=False,
    limits=(
        rule.not_beside(
            ("TokenSelector", "BatchPacker"),
            "The other policy replaces forwards of layers, but the depth selector must end the backward at a "
            "layer's input.",
        ),
        rule.at_linears("SparseBP finds autograd nodes in a backward of all layers, but this policy leaves some out."),
        rule.not_with(
            "segments", rule.GIVEN, "segments need gradients of all layers' inputs, but this policy ends the backward"
        ),
        rule.whole_weights(),
        rule.needs_optimizer("the choice of layers changes after each optimizer step"),
        rule.not_compiled("the backward ends at another layer at each step"),
    ),
)
