"""Define the policy kind that decides what is kept of a linear's input for the gradient of its weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from sparsebp_cli.policy import Kind, Policy, Site, Step, rule
from sparsebp_shelf.saver.form import SavedProjection

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import Saved


class InputSaver(Policy):
    """Decide what is kept of a linear's input until the backward.

    The forward, the input gradient and the bias gradient are dense. Several linears may read one input, such as
    queries, keys and values. The policy then decides once, under the name of the first linear, and the input is stored
    once. Linears whose weight is not trained store nothing, and the policy is not called for them.
    """

    where: list[str] | None = Field(
        None,
        description=(
            "Linear layers whose inputs the policy saves in less memory: globs over names, such as *.mlp.*. Other "
            "linear layers save their whole input. null: all."
        ),
        min_length=1,
    )
    layers: list[int] | None = Field(
        None,
        description=(
            "Transformer layers in which the policy saves inputs in less memory: numbers from 0, or from the end "
            "as -1; an encoder's layers come first. Other layers save whole inputs. null: all."
        ),
    )

    @property
    @abstractmethod
    def form(self) -> type[Saved] | None:
        """The type that ``save`` returns with these options; None if it always returns None."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """Fraction of the rows, features or entries that is kept, in (0, 1]; 1.0 if a form keeps something of each."""

    @property
    def draws_for(self) -> int | None:
        """Number of optimizer steps for which a linear's random choice stays the same, in all forwards and processes;
        None: each forward draws again."""
        return None

    @abstractmethod
    def save(self, x_ND: Tensor, site: Site, step: Step) -> Saved | None:
        """Return what is kept of an input.

        Args:
            x_ND: The input, all leading dimensions flattened to rows. It must not be changed.
            site: The first linear that reads it.
            step: The step of the forward; ``step.generator(site, x_ND.device)`` is the only source of randomness
                allowed. A layer that activation checkpointing computes again gets the step of its first forward.

        Returns:
            The compressed form; None keeps the input itself.
        """

    @abstractmethod
    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        """Return the bytes that are kept of an input; the conformance suite compares them with what is stored.

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
        """Return the bytes that are kept at a linear and a step, if the policy's state decides about them.

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
    "{other} and {policy} both change the weight gradients of the same linear layers: give one of them, or "
    "give each its own layers by where or layers"
)
INPUT_SAVER = Kind(
    InputSaver,
    asked="The policy decides in the forward, once for all linear layers that read the same input. Gradients of "
    "inputs and biases are dense. Weight gradients are exact if the input is saved unchanged, and unbiased if "
    "the mean of the restored input over random draws is the input. [Keep less of each "
    "input](../guide/memory.md#keep-less-of-each-input)\n",
    extensions=((200, "sparsebp_shelf.saver.extension:InputSaving"),),
    places="sparsebp_shelf.saver.extension:find_places",
    suite="sparsebp_shelf.saver.suite:check_input_saver",
    at_sites=True,
    needs_linears=True,
    makes_trials=True,
    facts=_find_facts,
    limits=(
        rule.Rule(_BOTH, policy={"placed": (False,)}, other={"kind": ("GradientSelector",)}),
        rule.Rule(_BOTH, other={"kind": ("GradientSelector",), "placed": (False,)}),
        rule.not_beside(
            ("TokenSelector", "BatchPacker"),
            "The other policy changes the rows of the batch, but the input saver draws random numbers by row.",
        ),
        rule.at_linears(does=" saves inputs of linear layers:"),
        rule.not_with("float8", rule.GIVEN, "float8 linear layers save their inputs in 8 bits already"),
        rule.whole_weights(),
    ),
)
