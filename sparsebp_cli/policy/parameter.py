"""The kind of policy that selects the parameters that are trained at a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparsebp_cli.policy.contract import Policy, Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import (
    Conditions,
    Rule,
    needs_optimizer,
    not_compiled,
    one_process,
)


@dataclass(frozen=True)
class Parameter:
    """A parameter that the model would train without a policy.

    Args:
        name: Name in the model; the first name of a shared parameter.
        layer: Index of its layer, from 0; an encoder's layers come before a decoder's. None outside of layers.
        num_entries: Number of its entries, at least 0.
        aliases: Its further names if modules share it, such as the name of a tied head's weight.
        shape: Its shape; a matrix has two dimensions.
    """

    name: str
    layer: int | None
    num_entries: int
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()


class ParameterSelector(Policy):
    """Selects the parameters that are trained, at the start of each step.

    The gradient of a trained parameter is bit-identical to the dense one: the engine only skips work that no trained
    parameter needs. ``exact`` and ``unbiased`` refer to all parameters. A policy that leaves out a parameter is neither
    exact nor unbiased, because no weight makes up for a missing gradient.
    """

    @property
    @abstractmethod
    def changes(self) -> bool:
        """Whether the selection may differ between steps with these options."""

    @property
    def drops_state(self) -> bool:
        """Whether the engine frees the optimizer's state of a parameter when it is no longer trained."""
        return False

    @abstractmethod
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        """Select parameters.

        Raise :class:`~sparsebp_cli.errors.PolicyError` for options that do not fit the model, such as a pattern that
        matches nothing: the engine also calls this at attach, before training starts.

        Args:
            parameters: All parameters that the model would train, in the model's order.
            step: The step of the decision; ``step.generator(...)`` is the only source of randomness allowed.
                Micro-batch, call, draw and rank are 0: one selection applies to the whole step, on every process and
                in every probe.

        Returns:
            Names of the trained parameters, at least one. The engine neither computes nor stores gradients of the
            others.
        """


def _find_facts(policy: ParameterSelector) -> Mapping[str, object]:
    return {
        "changes": policy.changes,
        "names_layers": policy.changes,
        "chooses_parameters": True,
    }


_TURNS: Conditions = {"changes": (True,)}
_TURNING = "{policy} with a set of trained parameters that changes"
_DDP = "DDP waits for a gradient of every parameter that was trainable when DDP was created"
PARAMETER_SELECTOR = Kind(
    ParameterSelector,
    asked="The policy decides at the start of each step. Parameters that a step does not train have no gradient.\n",
    extensions=((300, "sparsebp_cli.backward.kind.parameter.extension:ParameterExtension"),),
    places="sparsebp_cli.backward.kind.parameter.extension:find_places",
    suite="sparsebp_cli.testing.parameter:check_parameter_selector",
    at_sites=True,
    facts=_find_facts,
    limits=(
        one_process(f"{_DDP}.", what=_TURNING, facts=_TURNS),
        Rule(
            "{policy} got a model in DDP: call attach before you wrap the model in DDP",
            why=f"{_DDP}.",
            options={"wrapped": ("DDP",)},
        ),
        needs_optimizer(
            "SparseBP changes this set after each step of the optimizer, which it must know",
            what=_TURNING,
            facts=_TURNS,
        ),
        not_compiled("torch.compile would compile again for each set", what=_TURNING, facts=_TURNS),
    ),
)
