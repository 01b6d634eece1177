"""Define the policy kind that sends some positions through a layer in the forward; the others bypass it.

Shape letters: B examples, T positions, K positions that go through.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from sparsebp_cli.policy import Kind, Policy, Step, rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RoutedLayer:
    """A decoder layer, and the shape of its input batch.

    Args:
        number: Number of the layer, from 0.
        num_layers: Number of layers of the model.
        num_examples: Number of examples in the batch, B.
        length: T, the positions of each example, padding included.
    """

    number: int
    num_layers: int
    num_examples: int
    length: int

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(layer)``."""
        return f"layer {self.number}"


class TokenRouter(Policy):
    """Send positions of every example through a layer of the training forward; the others bypass it unchanged.

    The layer runs on the chosen positions only. They keep their position ids and attend to each other as far as the
    model's mask lets them. Their outputs return to their places after the layer. The gradient of a position that
    bypasses is the identity. Evaluation sends all positions through all layers, so the trained model differs from the
    evaluated one. A router that sends fewer is neither exact nor unbiased, compared with the dense backward of the
    dense forward.
    """

    @property
    def needs_num_steps(self) -> bool:
        """Whether the decision depends on the length of the training."""
        return False

    @property
    @final
    def unbiased(self) -> bool:
        return self.exact

    @abstractmethod
    def count(self, layer: RoutedLayer, step: Step) -> int:
        """Return K, the number of positions of each example that go through; the claim uses it.

        Args:
            layer: The layer, with the shape of the batch.
            step: The step.

        Returns:
            From 1 to T; T is dense.
        """

    @abstractmethod
    def route(self, layer: RoutedLayer, step: Step) -> torch.Tensor:
        """Choose the positions that go through; not called if ``count`` returns T.

        Args:
            layer: The layer, with the shape of the batch.
            step: The step of the decision; ``step.generator(layer)`` is the only source of randomness allowed. Every
                micro-batch and process decides about its own examples.

        Returns:
            ``index_BK``, int64 on the CPU: K positions of each example, ascending, each once.
        """


_AGAIN = "other positions go through a layer at each step"
TOKEN_ROUTER = Kind(
    TokenRouter,
    asked="Decides in the forward of training, layer by layer, for the examples of the micro-batch. Exact if "
    "all positions go through every layer, else biased: what is trained is another model than the one that is "
    "evaluated. [Send some positions through each layer](../guide/tokens.md#send-some-positions-through-each-layer)\n",
    extensions=((900, "sparsebp_shelf.token_router.extension:RoutingExtension"),),
    suite="sparsebp_shelf.token_router.suite:check_token_router",
    keeps_state=False,
    facts=lambda policy: {
        "needs_num_steps": "its number of positions grows over the training" if policy.needs_num_steps else ""
    },
    limits=(
        rule.not_beside(
            ("GradientSelector", "EdgeRouter", "TokenSelector", "BatchPacker", "BlockDropper", "InputSaver"),
            "Sites, blocks and saved inputs are known by the rows of the whole batch, of which a layer gets some only.",
        ),
        rule.at_linears("Nodes store tensors by their index among all positions."),
        rule.not_with(
            "segments",
            rule.GIVEN,
            "segments run the layers without gradients first, where every position goes through",
        ),
        rule.Rule(
            "{policy} routes tokens of a language model: needs {format:text} or completion, got {format:=}",
            options={"format": ("classification", "regression")},
        ),
        rule.whole_weights(),
        rule.Rule(
            "{policy} keeps a state, which is not supported for a policy that routes tokens",
            policy={"stateful": (True,)},
        ),
        rule.not_compiled(_AGAIN),
        rule.in_trainer_not_with("torch_compile", (True,), f"torch_compile: {_AGAIN}"),
    ),
)
