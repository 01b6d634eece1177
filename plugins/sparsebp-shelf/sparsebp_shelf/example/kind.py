"""Define the policy kind that selects the examples of a batch that are backpropagated.

Shape letters: B examples, K kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Kind, Policy, Step, returned, rule
from sparsebp_shelf.example.examples import Examples

if TYPE_CHECKING:
    import torch

REFERENCE_COLUMN = "reference_loss"  # batch column: the reference model's loss of each token


@dataclass(frozen=True)
class WeightedExamples:
    """Selected examples, and the weight of each example's loss.

    Args:
        index_K: Their numbers in the batch, int64, ascending, each once, at least one.
        weight_K: Factor of each one's loss, at least 0, finite. The number of targets of the whole batch, chosen or
            not, divides the sum of the weighted losses. So 1 / probability gives the gradient of all examples in the
            mean.
    """

    index_K: torch.Tensor
    weight_K: torch.Tensor


class ExampleSelector(Policy):
    """Select the examples of a batch that are backpropagated, before the forward that training differentiates.

    The engine runs that forward on the selected examples only. The loss is the mean over their targets, or a weighted
    sum (:class:`WeightedExamples`).
    """

    @property
    @abstractmethod
    def budget(self) -> float:
        """Fraction of a batch's examples that is selected at steps with a selection, in (0, 1]."""

    @abstractmethod
    def needs_loss(self, step: Step) -> bool:
        """Return whether ``choose`` reads the examples' losses at a step; they cost a forward, which is counted.

        Args:
            step: The step whose ``choose`` comes next.

        Returns:
            True if ``choose`` needs ``Examples`` with losses.
        """

    @property
    def needs_num_steps(self) -> bool:
        """Whether ``choose`` reads ``step.num_steps`` with these options; it is None unless the caller gave it."""
        return False

    @property
    def reads_gradient_norm(self) -> bool:
        """Whether ``choose`` reads the gradient norms at the logits beside losses; one forward gives both."""
        return False

    @property
    def fits_head(self) -> bool:
        """Whether ``choose`` works under a fused head, whose trainer has its own loss over the values of all examples.

        It then needs no losses and returns no weights. Examples that are not chosen have no gradient; the loss covers
        all examples. Each gradient is multiplied by the number of examples over the number of chosen ones.
        """
        return False

    @property
    def weighs(self) -> bool:
        """Whether ``choose`` may return weights; the model's loss must then be the cross-entropy of its logits."""
        return False

    @property
    def scored_share(self) -> float:
        """Fraction of the batch's positions, from the first, that the scoring forward reads, in (0, 1]."""
        return 1.0

    @abstractmethod
    def choose(self, examples: Examples, step: Step) -> torch.Tensor | WeightedExamples | None:
        """Return the examples to backpropagate.

        Args:
            examples: The batch. The policy must not change it.
            step: The step of the decision; ``step.generator(examples, device)`` is the only source of randomness
                allowed.

        Returns:
            Numbers of the examples, int64, (K,), ascending, each once, with weights if the policy ``weighs``; None: all
            examples.
        """


def require_examples(policy: ExampleSelector, choice: object, number: int) -> None:
    """Refuse what is not a valid choice among ``number`` examples (:class:`~sparsebp_cli.errors.PolicyError`)."""
    import torch

    asked = f"{type(policy).__name__}.choose"
    returned.require_type(asked, choice, torch.Tensor, *([WeightedExamples] if policy.weighs else []), None)
    if choice is None:
        return
    weight_K: object = None
    chosen: object = choice
    if isinstance(choice, WeightedExamples):
        asked, chosen, weight_K = f"{asked}: index_K", choice.index_K, choice.weight_K
    index_K = returned.require_index(asked, chosen, number)
    if not len(index_K):
        raise PolicyError(f"{asked} must contain at least one number, got none")
    shape = getattr(weight_K, "shape", type(weight_K).__name__)
    if weight_K is not None and shape != index_K.shape:
        raise PolicyError(f"{asked}: weight_K must have the shape of index_K, {tuple(index_K.shape)}, got {shape}")


def _find_facts(policy: ExampleSelector) -> Mapping[str, object]:
    return {
        "weighs": policy.weighs,
        "fits_head": policy.fits_head,
        "needs_num_steps": "start and end are fractions of the training's steps" if policy.needs_num_steps else "",
    }


_WEIGHING: rule.Conditions = {"weighs": (True,)}  # returns weights of examples
_COMPARING: rule.Conditions = {"compares": (True,)}  # compares with a reference
EXAMPLE_SELECTOR = Kind(
    ExampleSelector,
    asked="The policy decides before each training forward. The step's cost includes losses that it computes for "
    "this. Exact if it chooses all examples. Otherwise biased without weights, because the loss is a mean over "
    "targets, and examples have different numbers of targets. With weights, unbiased if each example's mean weight "
    "over random draws is 1, and the loss is divided by the number of targets of the whole batch. In the mean, a "
    "left-out example has the weight 0. "
    "[Train only some tokens or examples](../guide/tokens.md)\n",
    extensions=((600, "sparsebp_shelf.example.fused:make_example_extension"),),
    suite="sparsebp_shelf.example.suite:check_example_selector",
    at_sites=True,
    shortens=True,
    chooses_targets=True,
    weighs_examples=True,
    facts=_find_facts,
    limits=(
        rule.not_with(
            "segments", rule.GIVEN, "it weights the losses of examples outside of the model", facts=_WEIGHING
        ),
        rule.not_beside(
            ("TokenSelector",),
            "The example selector weights the loss of all positions of an example.",
            facts=_WEIGHING,
            options={"fused_head": (False,)},
        ),
        rule.Rule(
            "{policy} compares with a reference language model, so it needs {format:text} or completion, got "
            "{format:=}",
            policy=_COMPARING,
            options={"format": ("classification",)},
        ),
        rule.Rule(
            "{other} and {policy} both compare with a reference model: give one of them",
            policy=_COMPARING,
            other={"kind": ("TokenSelector",), "compares": (True,)},
        ),
    ),
)
