"""The kind of policy that selects the examples of a batch that are backpropagated.

Shape letters: B examples, K kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparsebp_cli.policy.contract import Policy, Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import (
    ABSENT,
    GIVEN,
    Conditions,
    Rule,
    needs,
    needs_optimizer,
    not_beside,
    not_in_trainer,
    not_with,
)

if TYPE_CHECKING:
    import torch

EXAMPLE_ROW = "example_row"  # the column of a batch with the row of each example in the training data, (B,), int64


@dataclass(frozen=True)
class Examples:
    """A batch as an example selector sees it.

    Args:
        number: Number of examples in the batch, B, at least 1.
        loss_B: The mean loss of each example's targets among the positions that were read, nats, float32, finite; of
            an example without any, the mean of the others. None if the policy does not need it.
        gradient_norm_B: The 2-norm of the gradient of each example's summed loss with respect to its logits at the
            same positions, float32, at least 0. None unless the policy reads it.
        reference_loss_B: The same as ``loss_B`` with the reference model. None unless the policy is a
            :class:`~sparsebp_cli.policy.ReferenceReader` and needs losses.
        row_B: The row of each example in the training data, int64. None unless the policy reads it.
        product_B: The inner product of the gradient of each example's mean loss with the mean of the validation
            examples' gradients, over the weights of trained linears. None unless ``num_validation`` is above 0.
        product_BB: The same among the examples, (B, B), symmetric.
        learning_rate: The optimizer's, of its first group, where there are products.
        weight_B: The size of the factor with which a trainer's own loss multiplies each example, at least 0, such as
            that of an advantage. None unless the policy reads it, where nobody has said it, and where the loss has more
            than these multiples.
    """

    number: int
    loss_B: torch.Tensor | None = None
    gradient_norm_B: torch.Tensor | None = None
    reference_loss_B: torch.Tensor | None = None
    row_B: torch.Tensor | None = None
    product_B: torch.Tensor | None = None
    product_BB: torch.Tensor | None = None
    learning_rate: float | None = None
    weight_B: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(examples, device)``."""
        return "examples"


@dataclass(frozen=True)
class WeightedExamples:
    """Examples that are selected, and how much the loss of each counts.

    Args:
        index_K: Their numbers in the batch, int64, ascending, each once, at least one.
        weight_K: Factor of each one's loss, at least 0, finite; 1 / probability makes a random choice unbiased.
        denominator: Divisor of the sum of the weighted losses. ``targets``: the number of targets of the whole batch,
            chosen or not, so that with weights of 1 / probability the gradient is that of all examples in the mean.
            ``weights``: each chosen example's targets times its weight, so that the loss is a weighted mean; biased,
            and never larger than the largest loss.
    """

    index_K: torch.Tensor
    weight_K: torch.Tensor
    denominator: Literal["targets", "weights"] = "targets"


class ExampleSelector(Policy):
    """Selects the examples of a batch that are backpropagated, before the forward that training differentiates. The
    engine runs that forward on the selected examples alone; its loss is the mean over their targets, or what the
    policy's weights make of it (:class:`WeightedExamples`)."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """Share of a batch's examples that is selected at steps with a selection, in (0, 1]."""

    @abstractmethod
    def needs_loss(self, step: Step) -> bool:
        """Return whether ``choose`` reads the examples' losses at a step; they cost a forward, which is counted.

        Args:
            step: The step whose ``choose`` comes next.

        Returns:
            Whether it reads them.
        """

    @property
    def needs_num_steps(self) -> bool:
        """Whether ``choose`` reads ``step.num_steps`` with these options; it is None where nobody gave it."""
        return False

    @property
    def reads_gradient_norm(self) -> bool:
        """Whether ``choose`` reads the norms of the gradients at the logits where it reads losses; they come with the
        same forward."""
        return False

    @property
    def reads_rows(self) -> bool:
        """Whether ``choose`` or ``observe`` reads which row of the training data each example is, as a policy that
        keeps something for each example does. Each batch then needs the column ``example_row``; of a policy with
        state, ``init`` gets all rows as its places."""
        return False

    @property
    def reads_weight(self) -> bool:
        """Whether ``choose`` reads how much a trainer's own loss multiplies each example, where the batch says it."""
        return False

    @property
    def fits_head(self) -> bool:
        """Whether ``choose`` can be asked under a fused head, whose trainer computes a loss of its own from the values
        of all examples: it needs no losses, then. What it does not choose has no gradient; the loss stays that of
        all. Without weights the gradient of each is multiplied by the number of examples over that of the chosen."""
        return False

    @property
    def num_validation(self) -> int:
        """Number of validation examples with whose mean gradient ``choose`` compares those of the examples, where it
        reads losses; 0: it reads no products of gradients. They are drawn anew for each batch from a part of the data
        that is never trained on."""
        return 0

    @property
    def weighs(self) -> bool:
        """Whether ``choose`` may return weights. The model's loss must then be the cross-entropy of its logits."""
        return False

    @property
    def scored_share(self) -> float:
        """Share of the batch's positions, from the first, that the forward for the losses reads, in (0, 1]."""
        return 1.0

    @abstractmethod
    def choose(self, examples: Examples, step: Step) -> torch.Tensor | WeightedExamples | None:
        """Select examples.

        Args:
            examples: The batch. It must not be changed.
            step: The step of the decision; ``step.generator(examples, device)`` is the only source of randomness
                allowed.

        Returns:
            Their numbers, int64, (K,), ascending, each once, with weights if it ``weighs``; None: all of them.
        """


def _find_facts(policy: ExampleSelector) -> Mapping[str, object]:
    return {
        "weighs": policy.weighs,
        "reads_rows": policy.reads_rows,
        "reads_weight": policy.reads_weight,
        "fits_head": policy.fits_head,
        "validates": policy.num_validation > 0,
        "num_validation": policy.num_validation,
        "needs_num_steps": "start and end are shares of the training" if policy.needs_num_steps else "",
    }


_WEIGHING: Conditions = {"weighs": (True,)}  # returns weights of examples
_VALIDATING: Conditions = {"validates": (True,)}  # compares gradients
_COMPARING: Conditions = {"compares": (True,)}  # with a reference
EXAMPLE_SELECTOR = Kind(
    ExampleSelector,
    asked="Decides before each forward of training, by the losses that it needs, whose cost is counted. "
    "Exact if all examples are chosen. Without weights it is biased else, because the loss is a mean over the targets "
    "of examples of unequal length. With weights it is unbiased if that of each example, 0 where it is left out, is 1 "
    "in the mean over draws, and the targets of the whole batch divide the loss. "
    "[Train only some tokens or examples](../guide/tokens.md)\n",
    extensions=((600, "sparsebp_cli.backward.kind.example.fused:make_example_extension"),),
    places="sparsebp_cli.backward.kind.example.extension:find_places",
    suite="sparsebp_cli.testing.example:check_example_selector",
    at_sites=True,
    shortens=True,
    chooses_targets=True,
    weighs_examples=True,
    facts=_find_facts,
    limits=(
        not_with("format", ("regression",), "it reads losses that are a cross-entropy"),
        not_with("segments", GIVEN, "it weighs the losses of examples outside of the model", facts=_WEIGHING),
        not_beside(
            ("TokenSelector",),
            "The losses that are weighted are those of all positions of an example.",
            facts=_WEIGHING,
            options={"fused_head": (False,)},
        ),
        Rule(
            "{policy} compares gradients with those of validation examples: give {policy_validation_examples:32} or "
            "another number, which are set aside from the training examples",
            policy=_VALIDATING,
            options={"policy_validation_examples": ABSENT},
        ),
        needs(
            "checkpointing",
            "none",
            ("full", "sparse"),
            "it differentiates a forward of its own, which stores everything",
            facts=_VALIDATING,
        ),
        not_with("segments", GIVEN, "it differentiates a forward of its own", facts=_VALIDATING),
        not_with("float8", GIVEN, "float8 rounds the gradients of weights that it compares", facts=_VALIDATING),
        needs_optimizer("its second-order term has the learning rate", facts=_VALIDATING),
        not_in_trainer(
            "{policy} needs validation examples, which a Trainer does not give; run a recipe, or your own loop with "
            "attach(validation=...)",
            facts=_VALIDATING,
        ),
        Rule(
            "{policy} compares with a reference language model: needs {format:text} or completion, got {format:=}",
            policy=_COMPARING,
            options={"format": ("classification",)},
        ),
        Rule(
            "{other} and {policy} both compare with a reference: give one of them",
            policy=_COMPARING,
            other={"kind": ("TokenSelector",), "compares": (True,)},
        ),
    ),
)
