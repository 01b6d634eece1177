"""The kind of policy that drops residual blocks from the backward, or from forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

from sparsebp_cli.policy import Kind, Observed, Policy, Step, rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ResidualBlock:
    """An attention or an MLP of a layer, with its norms: what the layer adds to the residual stream.

    Args:
        name: The module's name in the model, such as ``model.layers.3.mlp``.
        layer: Number of the layer that it belongs to, from 0, an encoder's before a decoder's; None outside of layers.
        kind: ``attention`` or ``mlp``.
        num_weights: Entries of its weight matrices, at least 0: its backward multiplies each row with each of them
            twice.
    """

    name: str
    layer: int | None
    kind: Literal["attention", "mlp"]
    num_weights: int


@dataclass(frozen=True)
class DropDraw:
    """What a policy draws random numbers for, once a step: ``step.generator(DropDraw())``."""

    name: str = "blocks"


class BlockDropper(Policy):
    """Drops residual blocks from the backward of a step, before its forward.

    The forward of a dropped block runs unchanged, and keeps nothing for the backward. Its parameters have no gradient
    at that step, so PyTorch's optimizers leave them alone, weight decay and state included. The residual stream's
    gradient passes unchanged. What the other blocks receive is therefore another gradient than the dense one, and no
    weight makes up for it: a policy that drops anything is neither exact nor unbiased.

    With ``skips_forward`` a dropped block is not computed at all in training: the layer adds nothing to the residual
    stream there. The outputs of the others may be multiplied by :meth:`factors`. What is trained is then another model
    than the one that is evaluated, which has all blocks and no factors. A factor of 1 over the share of steps at which
    a block is computed makes the mean of its *output* the dense one; the gradient stays biased all the same, because
    everything after the block is not linear in it.

    Args:
        skips_forward: Whether dropped blocks are left out of the forward as well.
    """

    skips_forward: ClassVar[bool] = False

    @property
    @abstractmethod
    def budget(self) -> float:
        """Mean share of the blocks whose backward runs, in (0, 1]; 1.0 drops nothing. Where it depends on the step or
        on the number of blocks, the least; see :meth:`budget_at`."""

    def budget_at(self, blocks: Sequence[ResidualBlock], step: Step) -> float:  # noqa: ARG002 - for overrides
        """Return the mean share of the blocks whose backward runs, over draws.

        Args:
            blocks: All of the model, in its order, at least one.
            step: The step whose share is asked for.

        Returns:
            At least ``budget``, which it is unless a policy defines otherwise.
        """
        return self.budget

    def factors(self, blocks: Sequence[ResidualBlock], step: Step) -> Mapping[str, float]:  # noqa: ARG002 - for overrides
        """Return what the outputs of blocks are multiplied by in training, where they are computed.

        Args:
            blocks: All of the model, in its order.
            step: The step whose forward is scaled.

        Returns:
            Finite numbers by the block's name, 1 for those that are missing. Only with ``skips_forward``.
        """
        return {}

    @property
    @final
    def exact(self) -> bool:
        return self.budget == 1.0

    @property
    @final
    def unbiased(self) -> bool:
        return self.exact

    @abstractmethod
    def drop(self, blocks: Sequence[ResidualBlock], step: Step) -> Collection[str]:
        """Choose the blocks that are dropped.

        Args:
            blocks: All of the model, in its order.
            step: The step of the decision; ``step.generator(DropDraw())`` is the only source of randomness allowed.
                Micro-batch, call and rank are 0: one choice holds for the whole step, in every forward and on every
                process.

        Returns:
            Their names; empty drops none.
        """


@dataclass(frozen=True)
class BlockGradient(Observed):
    """The gradient of what a residual block adds to the residual stream. There is none of a block that is dropped;
    where one module computes several blocks, each has that of their sum.

    Args:
        name: Name of the block.
        gradient: The gradient, in the shape of the block's output.
    """

    gradient: Tensor


_SKIPS: rule.Conditions = {"skips": (True,)}  # leaves blocks out of the forward, too
_AGAIN = "other blocks are dropped at each step, and each choice would be compiled again"
BLOCK_DROPPER = Kind(
    BlockDropper,
    asked="Decides at the start of each step. Exact if nothing is dropped, else biased: no weight makes up "
    "for what is missing in the gradient, even where the mean of each output is the dense one. Parameters of a "
    "dropped block have no gradient at that step. "
    "[Drop residual blocks](../guide/blocks.md)\n",
    extensions=((400, "sparsebp_shelf.block.extension:BlockExtension"),),
    places="sparsebp_shelf.block.layout:find_places",
    suite="sparsebp_shelf.block.suite:check_block_dropper",
    leaves_out_gradients=True,
    makes_trials=True,
    facts=lambda policy: {"skips": policy.skips_forward},
    limits=(
        rule.at_linears(
            "A branch that recomputes rows runs its norm later than the forward does, and nodes are known by the graph "
            "of every block."
        ),
        rule.whole_weights(),
        rule.not_beside(
            ("TokenSelector", "BatchPacker"),
            "Positions are selected and packed through the attention of every layer, which may be left out.",
            facts=_SKIPS,
        ),
        rule.not_with(
            "segments",
            rule.GIVEN,
            "segments run the layers without gradients first, where no block is left out",
            facts=_SKIPS,
        ),
        rule.needs_optimizer("one choice of blocks holds for all backward passes of a step"),
        rule.not_compiled(_AGAIN),
        rule.in_trainer_not_with("torch_compile", (True,), f"torch_compile: {_AGAIN}"),
    ),
)
