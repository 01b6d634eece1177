"""The kind of policy that leaves out the rows of a batch that no loss needs. The gradient stays the dense one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy.contract import Policy
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import (
    GIVEN,
    AllBut,
    Conditions,
    Rule,
    at_linears,
    in_trainer_not_with,
    not_beside,
    not_compiled,
    not_with,
    one_process,
)


@dataclass(frozen=True)
class PackedSize:
    """A batch as a packer sees it: what the engine would compute of it.

    Args:
        num_positions: Positions of the batch, examples times length, at least 1.
        num_rows: Rows of the layers that remain, from 1 to num_positions.
        num_head_rows: Rows of the head that remain, from 0 to num_positions; num_positions without such a head.
        num_last_rows: Rows of the last layer that remain, from 1 to num_rows; None: as many as of the others.
        head_share: Share of the head in the products of a step, in [0, 1].
        last_share: Share of the last layer in them, in [0, 1].
    """

    num_positions: int
    num_rows: int
    num_head_rows: int
    num_last_rows: int | None = None
    head_share: float = 0.1
    last_share: float = 0.1


class BatchPacker(Policy):
    """Leaves out rows of a batch. That changes no gradient except by rounding, so its only decision is whether it is
    worth it. All packers have the four options below; the engine implements them."""

    takes_schedules: ClassVar[bool] = False
    later_options: ClassVar[frozenset[str]] = frozenset({"logits"})
    # Rows of padding that are computed are attended to by others, so False was wrong with padding on the left.
    former_options: ClassVar[tuple[tuple[str, object], ...]] = (("padding", True),)

    labels: bool = Field(
        True,
        description="Leave out what follows the last label of an example. The head of a language model runs for "
        "positions with a label only, whatever this says.",
    )
    prefixes: Literal["share", "update", "separate"] = Field(
        "share",
        description="share: the tokens that several examples of a batch begin with are computed once. update: once for "
        "all micro-batches of an optimizer step, which a recipe arranges for it. separate: each example has rows of "
        "its own.",
    )
    verify: Literal["never", "first", "always"] = Field(
        "first",
        description="When the gradient is compared with that of the plain step. first: at the first batch, and at "
        "each that is longer, larger or otherwise arranged than all before it.",
    )

    logits: Literal["tiles", "whole"] = Field(
        "tiles",
        description="tiles: where that holds fewer bytes, the head and the model's own loss run for a part of the rows "
        "at a time, and the logits of all rows are computed when somebody reads them. whole: they are held.",
    )

    @property
    @final
    def exact(self) -> bool:
        return True

    @property
    @final
    def unbiased(self) -> bool:
        return True

    @abstractmethod
    def packs(self, size: PackedSize) -> bool:
        """Return whether a batch is packed; otherwise the plain forward runs, bit for bit, unless the head has tiles.

        Args:
            size: Rows that the layers and the head would compute of the batch.

        Returns:
            Whether to pack it.
        """


_OF_UPDATES: Conditions = {"shares_updates": (True,)}

BATCH_PACKER = Kind(
    BatchPacker,
    asked="Decides before each forward of training whether rows are left out. Always exact up to "
    "rounding; the gradient is compared with the plain one. [Same gradient, less work](../guide/lossless.md)\n",
    extensions=((500, "sparsebp_cli.backward.kind.packing.extension:PackingExtension"),),
    suite="sparsebp_cli.testing.packer:check_batch_packer",
    shortens=True,
    keeps_state=False,
    facts=lambda policy: {
        "shares_prefixes": policy.prefixes != "separate",
        "shares_updates": policy.prefixes == "update",
        "runs_reference": True,
    },
    limits=(
        not_beside(
            ("GradientSelector", "EdgeRouter"),
            "A packed batch has rows instead of examples, and selectors decide by example and position.",
        ),
        not_beside(
            ("ExampleSelector",),
            "Examples are scored, and their losses weighed, by the logits of a plain forward. Under trl's fused head "
            "they are chosen around the packed forward.",
            options={"fused_head": (False,)},
        ),
        Rule(
            "{other} and {policy} in one forward is built for mode: exact alone: set it, or give one of them",
            why="Modes detach and stop make constants of rows by example and position.",
            other={"kind": ("TokenSelector",), "mode": ("detach", "stop")},
        ),
        one_process(
            "Gradients would have to be summed over the processes after the last of what they share.",
            what="{policy} with prefixes: update",
            facts=_OF_UPDATES,
        ),
        not_with("update", ("eager",), "gradients of what micro-batches share come after theirs", facts=_OF_UPDATES),
        not_with("compile", (True,), "what micro-batches share is not compiled", facts=_OF_UPDATES),
        not_compiled(
            "what micro-batches share is not compiled", what="{policy} with prefixes: update", facts=_OF_UPDATES
        ),
        Rule(
            "{other} and {policy} in one forward is not built with prefixes: update: give one of them, or try "
            "prefixes: share",
            why="What several micro-batches share is computed before it is known what other policies choose in each.",
            policy=_OF_UPDATES,
            other={"kind": AllBut(("ParameterSelector",))},
        ),
        at_linears("Branches and nodes are known by the examples and positions of the plain forward."),
        not_with("segments", GIVEN, "it changes the batch inside of the forward"),
        in_trainer_not_with(
            "neftune_noise_alpha",
            GIVEN,
            "{neftune_noise_alpha}: the noise depends on how the batch is arranged",
        ),
    ),
)
