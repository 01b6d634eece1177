"""Define the policy kind that chooses examples after the first layers of the training forward.

Shape letters: B examples, K chosen, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from sparsebp_cli.policy import Kind, Observed, Policy, Step, rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FeatureWidth:
    """The place of a midway decision: the policy's state may have an entry for each feature.

    Args:
        width: D, the width of the layers.
        name: Name of the only place.
    """

    width: int
    name: str = "features"


@dataclass(frozen=True)
class Features:
    """A batch after the first layers.

    Args:
        number: B, at least 1.
        feature_BD: The mean of each example's hidden states after the first layers over its non-padding positions,
            float32, without a graph. None if the policy does not read it.
    """

    number: int
    feature_BD: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(features)``."""
        return "features"


@dataclass(frozen=True)
class ReadFeatures(Observed):
    """The features of a micro-batch among which a policy of this kind chooses.

    Args:
        name: Name of the place, ``features``.
        feature_BD: The features of all examples, float32.
    """

    is_gradient: ClassVar[bool] = False
    feature_BD: torch.Tensor


class MidwaySelector(Policy):
    """Choose the examples that go on after the first layers of the forward; the others have no loss.

    All examples of a micro-batch go through the first layers once. The chosen ones go on in the same forward, and the
    loss is the mean over their targets. The backward of the first layers computes the rows of all examples; examples
    that stopped have zero gradients. Nothing corrects for them, so a policy that stops any example is neither exact nor
    unbiased.
    """

    @property
    @abstractmethod
    def num_first(self) -> int:
        """Number of layers that all examples go through, at least 1 and fewer than the model has."""

    @property
    @abstractmethod
    def reads_features(self) -> bool:
        """Whether ``choose`` or ``measure`` reads features."""

    @property
    @final
    def unbiased(self) -> bool:
        return self.exact

    @abstractmethod
    def count(self, number: int, step: Step) -> int:
        """Return K, how many of B examples go on; the claim uses it.

        Args:
            number: B.
            step: The step, with the policy's state if it has one.

        Returns:
            From 1 to B; B is dense.
        """

    @abstractmethod
    def choose(self, features: Features, step: Step) -> torch.Tensor:
        """Choose the examples that go on; not called if ``count`` returns B.

        Args:
            features: The micro-batch's features.
            step: The step; ``step.generator(features)`` is the only source of randomness allowed.

        Returns:
            ``index_K``, int64: numbers of the examples, ascending, each once, on any device.
        """


def _find_facts(policy: MidwaySelector) -> Mapping[str, object]:
    return {"stops_examples": not policy.exact}


MIDWAY_SELECTOR = Kind(
    MidwaySelector,
    asked="Decides in the forward of training, behind the first layers, by the examples' features there. Exact if "
    "all examples go on, else biased: the loss is the mean over the targets of those that do.\n",
    extensions=((Kind.OF_PACKAGES, "sparsebp_shelf.midway.extension:MidwayExtension"),),
    places="sparsebp_shelf.midway.extension:find_places",
    suite="sparsebp_shelf.midway.suite:check_midway_selector",
    shortens=True,
    chooses_targets=True,
    weighs_examples=True,
    facts=_find_facts,
    limits=(
        rule.not_beside(
            rule.AllBut(("ParameterSelector", "PartSelector")),
            "They count positions and examples of the whole batch, of which the upper layers get some only.",
        ),
        rule.at_linears("Nodes store tensors by their index among all examples."),
        rule.not_with(
            "segments", rule.GIVEN, "segments run the layers without gradients first, where every example goes on"
        ),
        rule.not_compiled("what goes on differs by step"),
    ),
)
