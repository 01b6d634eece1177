"""Define the policy kind that chooses which parts of weights are trained.

Shape letters: D input width, O output width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from sparsebp_cli.policy import Kind, Observed, Policy, Step, rule

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_shelf.part.weight_part import WeightPart


@final
@dataclass(frozen=True, eq=False)
class TrainedWeight:
    """The weight of a linear that the model would train without a policy.

    Args:
        name: Name of the linear, such as ``model.layers.3.mlp.down_proj``.
        layer: Number of its layer, from 0; None outside of layers.
        matrix_OD: The weight as it is now, output by input, without a copy. It must not be changed.
    """

    name: str
    layer: int | None
    matrix_OD: Tensor

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.matrix_OD.shape[0]

    @property
    def num_inputs(self) -> int:
        """D."""
        return self.matrix_OD.shape[1]


class PartSelector(Policy):
    """Choose which parts of the weights of linears are trained, once for the whole training; all else is frozen.

    The optimizer gets a parameter of the part's shape instead of the weight, so it has state for the part only. The
    gradient of a part is the dense gradient of its entries. With ``of_frozen`` other parameters are trained, too. A
    policy that chooses by gradients is also :class:`~sparsebp_cli.policy.Stateful`. It requests trial passes before
    step 0, which are dense, observes :class:`WeightGradient`, and stores its choice as its state. A policy that chooses
    by weights stores its choice in ``init``.
    """

    takes_schedules: ClassVar[bool] = False

    @property
    def of_frozen(self) -> bool:
        """Whether the policy trains parts of weights that the user has frozen, such as weights under adapters. All
        parameters that the user trains are then trained whole as well; dense means training both."""
        return False

    @property
    def exact(self) -> bool:
        """False: the rest of each weight is not trained."""
        return False

    @property
    def unbiased(self) -> bool:
        """False: nothing corrects for a missing gradient."""
        return False

    @abstractmethod
    def parts(self, weights: Sequence[TrainedWeight], step: Step) -> Mapping[str, WeightPart]:
        """Return the part of each weight that is trained.

        Raise :class:`~sparsebp_cli.errors.PolicyError` for options that do not fit the model, such as a pattern that
        matches nothing. The engine calls this method when the policy is attached, before training starts.

        Args:
            weights: Weights of all linears that can be trained in part, in the model's order. Weights that are tied,
                quantised, sharded, in float8, parametrized or frozen by the user are missing; with ``of_frozen`` these
                are the frozen ones.
            step: Always of index 0, with the state; ``step.generator(...)`` is the only source of randomness allowed.

        Returns:
            Parts by the name of the linear, at least one; linears that are missing are not trained. Equal calls must
            return equal parts.
        """


@dataclass(frozen=True)
class WeightGradient(Observed):
    """The gradient of a linear's weight, in trial passes only.

    Args:
        name: Name of the linear.
        gradient_OD: The gradient, output by input, in the weight's own precision.
    """

    gradient_OD: Tensor


PART_SELECTOR = Kind(
    PartSelector,
    asked="The policy decides once, before the first step. Never exact, because it trains only parts of the weights. "
    "The gradient of a part equals the dense gradient of its entries. [Train a part of each "
    "weight](../guide/frozen.md#train-a-part-of-each-weight)\n",
    extensions=((1_100, "sparsebp_shelf.part.extension:PartExtension"),),
    places="sparsebp_shelf.part.extension:find_places",
    suite="sparsebp_shelf.part.suite:check_part_selector",
    makes_trials=True,
    limits=(
        rule.not_beside(
            rule.AllBut(("PartSelector", "ExampleSelector")),
            "A part selector replaces the forwards of linear layers, replaces weights in the optimizer, and freezes "
            "all other parameters.",
            where="training",
        ),
        rule.at_linears(does=" trains parts of the weights of linear layers:"),
        rule.needs(
            "update", "deferred", ("eager",), "SparseBP writes the parts into the weights only after a whole step"
        ),
        rule.not_with("segments", rule.GIVEN, "segments support whole parameters, but not parts of weights"),
        rule.one_process(
            "DDP and FSDP synchronise parameters of the model, and parts are not parameters of the model."
        ),
        rule.not_with(
            "optim", ("adagrad",), "this optimizer creates state of whole weights before the policy chooses parts"
        ),
        rule.not_with("float8", rule.GIVEN, "a part would need another float8 scale than the whole weight"),
        rule.not_with("quantization", rule.GIVEN, "quantised weights cannot be trained in part"),
        rule.not_in_trainer(
            "{policy} trains parts of weights, which a Trainer does not support, because it clips gradients of "
            "whole parameters; run a recipe, or your own loop"
        ),
        rule.needs_optimizer("SparseBP replaces weights by parts in the optimizer"),
        rule.Rule(
            "{policy} under DDP is not supported: DDP synchronises parameters, but not parts of weights",
            options={"wrapped": ("DDP",)},
        ),
        rule.not_compiled("compiled layers would run the old forwards of their linear layers"),
    ),
)
