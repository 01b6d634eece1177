"""The kind of policy that drops residual blocks from the backward, or from forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from sparsebp_cli.policy.contract import Policy, Step


@dataclass(frozen=True)
class ResidualBlock:
    """An attention or an MLP of a layer, with its norms: what the layer adds to the residual stream.

    Args:
        name: The module's name in the model, such as ``model.layers.3.mlp``.
        layer: Number of the layer that it belongs to, from 0, an encoder's before a decoder's; None outside of layers.
        kind: Which of the two it is.
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

    The forward of a dropped block runs as ever, and keeps nothing for the backward. Its parameters have no gradient at
    that step, so PyTorch's optimizers leave them alone, weight decay and state included. The gradient of the residual
    stream passes unchanged. What the other blocks receive is therefore another gradient than the dense one, and no
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
            step: When.

        Returns:
            At least ``budget``, which it is unless a policy defines otherwise.
        """
        return self.budget

    def factors(self, blocks: Sequence[ResidualBlock], step: Step) -> Mapping[str, float]:  # noqa: ARG002 - for overrides
        """Return what the outputs of blocks are multiplied by in training, where they are computed.

        Args:
            blocks: All of the model, in its order.
            step: When.

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
            step: When; ``step.generator(DropDraw())`` is the only source of randomness allowed. Micro-batch, call and
                rank are 0: one choice holds for the whole step, in every forward and on every process.

        Returns:
            Their names; empty drops none.
        """
