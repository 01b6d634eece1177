"""The kind of policy that decides what stays of a linear's input for the gradient of its weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from sparsebp_cli.policy.contract import Policy, Site, Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import GIVEN, Rule, at_linears, not_beside, not_with, whole_weights
from sparsebp_cli.policy.saved_projection import SavedProjection

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy.saved import Saved


class InputSaver(Policy):
    """Decides in the forward what stays of a linear's input for the gradient of its weight.

    The forward, the gradient of the input and that of the bias are the dense ones. An input that several linears read,
    as those of queries, keys and values do, is decided about and stored once, under the name of the first of them.
    Nothing is asked for linears whose weight is not trained, and nothing of their input is stored.
    """

    where: list[str] | None = Field(
        None,
        description="Globs over the names of the linears of which less is saved, such as *.mlp.*. Others save their "
        "whole input. null: all.",
        min_length=1,
    )
    layers: list[int] | None = Field(
        None,
        description="Layers in which less is saved, from 0, or from the end as -1; an encoder's come before a "
        "decoder's. Others save whole inputs. null: all.",
    )

    @property
    @abstractmethod
    def form(self) -> type[Saved] | None:
        """The type that ``save`` returns with these options; None if it always returns None."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """Share of the rows, features or entries that stay, in (0, 1]; 1.0 for forms that keep something of each."""

    @property
    def draws_for(self) -> int | None:
        """Optimizer steps for which a linear's random choice stays the same, in all forwards and in every process;
        None: each forward draws anew."""
        return None

    @abstractmethod
    def save(self, x_ND: Tensor, site: Site, step: Step) -> Saved | None:
        """Return what stays of an input.

        Args:
            x_ND: The input, all leading dimensions flattened to rows. It must not be changed.
            site: The first linear that reads it.
            step: The step of the forward; ``step.generator(site, x_ND.device)`` is the only source of randomness
                allowed. A layer that activation checkpointing computes again is asked with the step of its first
                forward.

        Returns:
            What stays; None keeps the input itself.
        """

    @abstractmethod
    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        """Return the bytes that stay of an input: the claim that the conformance suite compares with what is stored.

        Args:
            num_rows: Rows of the input, N.
            num_features: Features of the input, D.
            itemsize: Bytes of an entry.

        Returns:
            Bytes.
        """

    def count_bytes_at(
        self,
        site: Site,  # noqa: ARG002 - for overrides
        step: Step,  # noqa: ARG002 - for overrides
        num_rows: int,
        num_features: int,
        itemsize: int,
    ) -> int:
        """Return the same at a linear and a step, of a policy whose state says how much stays where.

        Args:
            site: The first linear that reads the input.
            step: The step of the forward, with the state.
            num_rows: Rows of the input, N.
            num_features: Features of the input, D.
            itemsize: Bytes of an entry.

        Returns:
            Bytes; by default those of ``count_bytes``.
        """
        return self.count_bytes(num_rows, num_features, itemsize)


def _find_facts(policy: InputSaver) -> Mapping[str, object]:
    layers = policy.layers is not None
    keeps = policy.form is SavedProjection and policy.draws_for is not None
    return {"placed": policy.where is not None or layers, "names_layers": layers, "keeps_projection": keeps}


_BOTH = (
    "{other} and {policy} both decide what the gradients of weights are computed from: give one of them, or each its "
    "own linears by where or layers"
)
INPUT_SAVER = Kind(
    InputSaver,
    asked="Decides in the forward, once for all linears that read one input. The gradients of inputs and "
    "biases are dense; exact if inputs are kept as they are, unbiased if what is restored has the input as its mean. "
    "[Keep less of each input](../guide/memory.md#keep-less-of-each-input)\n",
    extensions=((200, "sparsebp_cli.backward.linear.saving:InputSaving"),),
    places="sparsebp_cli.backward.linear.saving:find_places",
    suite="sparsebp_cli.testing.saver:check_input_saver",
    at_sites=True,
    needs_linears=True,
    makes_trials=True,
    facts=_find_facts,
    limits=(
        Rule(_BOTH, policy={"placed": (False,)}, other={"kind": ("GradientSelector",)}),
        Rule(_BOTH, other={"kind": ("GradientSelector",), "placed": (False,)}),
        not_beside(
            ("TokenSelector", "BatchPacker"),
            "Selected positions and packed batches have rows of their own, and what is saved is drawn by row.",
        ),
        at_linears(does=" saves inputs of linears:"),
        not_with("float8", GIVEN, "float8 linears save their inputs in 8 bits themselves"),
        whole_weights(),
    ),
)
