"""Define the policy kind that estimates the gradient of a step from losses alone, without a backward.

Shape letters: S points along the random direction of a step, at which the loss is computed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from sparsebp_cli.policy import Kind, Policy, Step, rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DirectionDraw:
    """Key of a policy's random numbers for one parameter's part of the direction: ``step.generator(draw)``.

    Args:
        parameter: The parameter's name in the model.
    """

    parameter: str

    @property
    def name(self) -> str:
        """Name of the draw."""
        return f"direction 0/{self.parameter}"  # as in 0.5, so that its runs go on with the same draws


class GradientEstimator(Policy):
    """Estimate the gradient of a step from losses at shifted weights, instead of a backward.

    With the step's random direction z the engine adds ``shift * z`` to the trained weights, runs the forward without
    autograd in evaluation mode, and restores the weights bit by bit. The optimizer gets the direction times a
    coefficient. All micro-batches of a step use the same direction.

    The estimate is never exact. ``unbiased`` means that its mean over draws is the gradient of every loss that is
    quadratic in the weights. For other losses the mean is the gradient of a smoothed loss, which differs by terms of
    the order of the squared shifts.
    """

    @property
    @final
    def exact(self) -> bool:
        return False

    @property
    @abstractmethod
    def shifts(self) -> Sequence[float]:
        """The S points along the direction, at least two different finite numbers; each costs one forward."""

    @abstractmethod
    def draw(self, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        """Return one parameter's part of a direction.

        Args:
            shape: Shape of the parameter, and of the result.
            generator: The only source of randomness allowed; the result lies on its device.

        Returns:
            The part, float32.
        """

    @abstractmethod
    def estimate(self, loss_S: Sequence[float], step: Step) -> float:
        """Return the coefficient of the direction in the gradient, computed from the losses.

        Args:
            loss_S: The micro-batch's part of the step's loss at each point; the parts of a step add up to its loss.
            step: The step. Micro-batch, call and rank are 0: one choice holds for the whole step.

        Returns:
            The coefficient. It must be linear in the losses, so that the micro-batches' estimates add up to the step's.
        """


GRADIENT_ESTIMATOR = Kind(
    GradientEstimator,
    keeps_state=False,
    asked="Estimates the gradient of a step from losses at shifted weights: there is no backward. Never "
    "exact; unbiased if the mean over draws is the gradient of every quadratic loss. "
    "[Estimate gradients without a backward](../guide/library.md#estimate-gradients-without-a-backward)\n",
    extensions=((800, "sparsebp_shelf.estimator.extension:EstimatorExtension"),),
    suite="sparsebp_shelf.estimator.suite:check_gradient_estimator",
    has_backward=False,
    limits=(
        rule.not_beside(
            rule.AllBut(("GradientEstimator",)),
            "Without a backward there are no gradients at sites and nodes, nothing is saved for them, and the losses "
            "are those of the model in evaluation mode.",
            where="training",
        ),
        rule.not_in_trainer(
            "{policy} estimates gradients without a backward, which a Trainer cannot; run a recipe, or your own loop "
            "with engine.estimate"
        ),
    ),
)
