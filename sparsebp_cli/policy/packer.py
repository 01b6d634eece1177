"""The kind of policy that skips token positions that no loss needs. The gradient equals the dense one."""

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
    """The size of a batch before and after packing, for a ``BatchPacker``.

    Args:
        num_positions: Positions of the batch, examples times length, at least 1.
        num_rows: Rows that the layers compute after packing, from 1 to num_positions.
        num_head_rows: Rows that the head computes after packing, from 0 to num_positions; num_positions if the head
            cannot skip rows.
        num_last_rows: Rows that the last layer computes after packing, from 1 to num_rows; None: num_rows.
        head_share: Fraction of a step's multiplications in the head, in [0, 1].
        last_share: Fraction of a step's multiplications in the last layer, in [0, 1].
    """

    num_positions: int
    num_rows: int
    num_head_rows: int
    num_last_rows: int | None = None
    head_share: float = 0.1
    last_share: float = 0.1


class BatchPacker(Policy):
    """A policy that decides whether to pack a batch, so that the engine skips positions that need no computation.
    Packing changes gradients only by rounding, so the policy decides only whether it saves work. The engine implements
    the four options below for all packers."""

    takes_schedules: ClassVar[bool] = False
    later_options: ClassVar[frozenset[str]] = frozenset({"logits"})
    # With False, other rows attended to computed padding, which was wrong for padding on the left.
    former_options: ClassVar[tuple[tuple[str, object], ...]] = (("padding", True),)

    labels: bool = Field(
        True,
        description="Skip the positions after the last label of an example. Even with false, a language-model head "
        "runs only for positions with a label.",
    )
    prefixes: Literal["share", "update", "separate"] = Field(
        "share",
        description="share: compute once a prefix that several examples of a batch have in common. update: compute "
        "it once for all micro-batches of an optimizer step (your own loop must call engine.expect). separate: "
        "compute the prefix in each example.",
    )
    verify: Literal["never", "first", "always"] = Field(
        "first",
        description="When to compare the gradient with that of the ordinary step. first: at the first batch of each "
        "kind (which positions are skipped), at each that is longer or has more examples, and at one in 200 others.",
    )

    logits: Literal["tiles", "whole"] = Field(
        "tiles",
        description="tiles: if this needs less memory, run the head and the model's loss on some token positions at a "
        "time. If the script reads the logits, compute them again for all. whole: keep all logits.",
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
        """Return whether to pack a batch. Otherwise the plain forward runs, bit-identical unless the head has tiles.

        Args:
            size: Rows that the layers and the head would compute after packing.

        Returns:
            Whether to pack the batch.
        """


_OF_UPDATES: Conditions = {"shares_updates": (True,)}

BATCH_PACKER = Kind(
    BatchPacker,
    asked="Before each training forward, the policy decides which token positions to skip. Exact up to rounding; "
    "`verify` compares the gradient with an ordinary backward. [Same gradient, less work](../guide/lossless.md)\n",
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
            "lossless rearranges the batch, but the other policy decides by example and position.",
        ),
        not_beside(
            ("ExampleSelector",),
            "The other policy scores and weights examples by the logits of an ordinary forward. Under trl's "
            "fused head it chooses examples before the packed forward.",
            options={"fused_head": (False,)},
        ),
        Rule(
            "{other} and {policy} in one forward need mode: exact: set this mode, or give only one of them",
            why="With mode: detach, some positions are constants, found by example and position.",
            other={"kind": ("TokenSelector",), "mode": ("detach",)},
        ),
        one_process(
            "The backward of shared prefixes comes last, after the processes have summed their gradients.",
            what="{policy} with prefixes: update",
            facts=_OF_UPDATES,
        ),
        not_with(
            "update", ("eager",), "the gradients of shared prefixes come after the last micro-batch", facts=_OF_UPDATES
        ),
        not_with("compile", (True,), "shared prefixes run uncompiled", facts=_OF_UPDATES),
        not_compiled("shared prefixes run uncompiled", what="{policy} with prefixes: update", facts=_OF_UPDATES),
        Rule(
            "{other} and {policy} in one forward is not supported with prefixes: update: give only one of them, or "
            "set prefixes: share",
            why="Shared prefixes run before the other policy decides in each micro-batch.",
            policy=_OF_UPDATES,
            other={"kind": AllBut(("ParameterSelector",))},
        ),
        at_linears("Node gradients are stored by the examples and positions of the ordinary forward."),
        not_with("segments", GIVEN, "it rearranges the batch inside the forward"),
        in_trainer_not_with(
            "neftune_noise_alpha",
            GIVEN,
            "{neftune_noise_alpha}: the noise depends on how the batch is arranged",
        ),
    ),
)
