"""Define the policy kind that drops residual blocks from the backward, or from forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from sparsebp_cli.policy import Kind, Policy, Step, rule


@dataclass(frozen=True)
class ResidualBlock:
    """An attention or an MLP of a layer, with its norms: what the layer adds to the residual stream.

    Args:
        name: The module's name in the model, such as ``model.layers.3.mlp``.
        layer: Number of its layer, from 0, encoder layers before decoder layers; None outside of layers.
        kind: ``attention`` or ``mlp``.
        num_weights: Entries of its weight matrices, at least 0. The backward multiplies each row with each entry twice.
    """

    name: str
    layer: int | None
    kind: Literal["attention", "mlp"]
    num_weights: int


@dataclass(frozen=True)
class DropDraw:
    """Key of a policy's random numbers, once a step: ``step.generator(DropDraw())``."""

    name: str = "blocks"


class BlockDropper(Policy):
    """Drop residual blocks from the backward of a step; the policy chooses before the step's forward.

    The forward of a dropped block runs unchanged and saves nothing for the backward. Its parameters have no gradient at
    that step, so PyTorch's optimizers skip them, weight decay and state included. The residual stream's gradient passes
    unchanged. The gradient of the other blocks therefore differs from the dense one, and no weight corrects it: a
    policy that drops any block is neither exact nor unbiased.

    With ``skips_forward`` training does not compute a dropped block at all: the layer adds nothing to the residual
    stream. Evaluation computes all blocks, so the trained model differs from the evaluated one.

    Args:
        skips_forward: Whether dropped blocks are left out of the forward as well.
    """

    skips_forward: ClassVar[bool] = False

    @property
    @abstractmethod
    def budget(self) -> float:
        """Mean fraction of the blocks whose backward runs, in (0, 1]; 1.0 drops nothing."""

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
        """Return the names of the blocks that this step drops.

        Args:
            blocks: All blocks of the model, in its order.
            step: The step of the decision; ``step.generator(DropDraw())`` is the only source of randomness allowed.
                Micro-batch, call and rank are 0: one choice holds for the whole step, in every forward and on every
                process.

        Returns:
            Names; an empty collection drops none.
        """


_SKIPS: rule.Conditions = {"skips": (True,)}  # the policy leaves blocks out of the forward, too
_AGAIN = "each step drops different blocks, so torch.compile would compile again"
BLOCK_DROPPER = Kind(
    BlockDropper,
    asked="The policy decides at the start of each step. Exact if no block is dropped. Otherwise biased, even if the "
    "mean output equals the dense output, because no factor makes up for the missing gradient. Parameters of a dropped "
    "block have no gradient at that step. [Drop residual blocks](../guide/blocks.md)\n",
    extensions=((400, "sparsebp_shelf.block.extension:BlockExtension"),),
    places="sparsebp_shelf.block.layout:find_places",
    suite="sparsebp_shelf.block.suite:check_block_dropper",
    leaves_out_gradients=True,
    makes_trials=True,
    facts=lambda policy: {"skips": policy.skips_forward},
    limits=(
        rule.at_linears("SparseBP finds autograd nodes by a graph with all blocks, but each step drops some."),
        rule.whole_weights(),
        rule.not_beside(
            ("TokenSelector", "BatchPacker"),
            "The other policy selects or packs positions in the attention of every layer, but this one skips layers.",
            facts=_SKIPS,
        ),
        rule.not_with(
            "segments",
            rule.GIVEN,
            "segments first run all blocks, without gradients",
            facts=_SKIPS,
        ),
        rule.needs_optimizer("the choice of blocks changes after each optimizer step"),
        rule.not_compiled(_AGAIN),
        rule.in_trainer_not_with("torch_compile", (True,), f"torch_compile: {_AGAIN}"),
    ),
)
