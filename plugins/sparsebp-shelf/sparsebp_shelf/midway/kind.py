"""The kind of policy that chooses examples behind the first layers of the forward that training differentiates.

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
    """Where such a policy decides: its state may have an entry for each feature.

    Args:
        width: D, of the layers.
        name: Of the only place.
    """

    width: int
    name: str = "features"


@dataclass(frozen=True)
class Features:
    """A batch behind the first layers.

    Args:
        number: B, at least 1.
        feature_BD: The mean of each example's hidden states behind the first layers over its positions that are not
            padding, float32, without a graph. None if the policy does not read it.
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
        name: Of the place, ``features``.
        feature_BD: Of all examples, float32.
    """

    is_gradient: ClassVar[bool] = False
    feature_BD: torch.Tensor


class MidwaySelector(Policy):
    """Chooses the examples that go on behind the first layers of the forward; the others have no loss.

    All examples of a micro-batch go through the first layers, once; the chosen ones go on from there, in the same
    forward. The loss is the mean over their targets. The backward of the first layers has the rows of all examples:
    those of an example that stopped have a gradient of zero. Nothing makes up for what stopped, so a policy that stops
    any example is neither exact nor unbiased.
    """

    @property
    @abstractmethod
    def num_first(self) -> int:
        """Layers that all examples go through, at least 1 and fewer than the model has."""

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
        """Return K, how many of B examples go on; the claim is computed from it.

        Args:
            number: B.
            step: When, with the policy's state if it has one.

        Returns:
            From 1 to B; B is dense.
        """

    @abstractmethod
    def choose(self, features: Features, step: Step) -> torch.Tensor:
        """Choose the examples that go on; not asked where ``count`` is B.

        Args:
            features: Of the micro-batch.
            step: When; ``step.generator(features)`` is the only source of randomness allowed.

        Returns:
            ``index_K``, int64: their numbers, ascending, each once, on any device.
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
        rule.at_linears("Branches and nodes store tensors by their index among all examples."),
        rule.not_with(
            "segments", rule.GIVEN, "segments run the layers without gradients first, where every example goes on"
        ),
        rule.not_compiled("what goes on differs by step"),
    ),
)
