"""Define the policy kind that computes only some channels of frozen weights under adapters.

Shape letters: C channels of a group, K kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from sparsebp_cli.policy import Kind, Policy, Step, rule

if TYPE_CHECKING:
    import torch

Part: TypeAlias = Literal["mlp", "qk", "vo"]
Estimate: TypeAlias = Literal["svd", "exact", "none"]


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are kept or left out together.

    Args:
        module: The name of the MLP or attention in the model.
        layer: Number of its layer, from 0.
        num_layers: Number of layers of the model.
        part: ``mlp``: outputs of gate and up, which are the inputs of down. ``qk``: outputs of key, and the same
            channels of all query heads that share a key head. ``vo``: outputs of value, and the inputs of the output
            projection that come from them.
        num_channels: C.
    """

    module: str
    layer: int
    num_layers: int
    part: Part
    num_channels: int

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(group)``."""
        return f"{self.module}/{self.part}"


class ChannelSelector(Policy):
    """Choose the channels of frozen weights that training computes, in the forward and so in the backward.

    Adapters stay dense: under an adapter, only the frozen weight's own product leaves channels out. Output positions,
    whose losses are computed, may keep all channels. Evaluation computes all channels, so the trained model differs
    from the evaluated one. A policy that leaves any channel out is therefore neither exact nor unbiased, compared with
    the dense backward of the dense forward.
    """

    @property
    @abstractmethod
    def estimate(self) -> Estimate:
        """What ``choose`` reads: norms of channels from a low-rank product, from the weights themselves, or none."""

    @property
    @abstractmethod
    def num_singular(self) -> int:
        """Number of singular values of each weight in the low-rank product, at least 1."""

    @property
    @abstractmethod
    def keeps_outputs(self) -> bool:
        """Whether output positions keep all channels."""

    @property
    def needs_num_steps(self) -> bool:
        """Whether the decision depends on the length of the training."""
        return False

    @property
    @final
    def unbiased(self) -> bool:
        return self.exact

    @abstractmethod
    def count(self, group: ChannelGroup, step: Step) -> int:
        """Return K, the number of channels of a group that are computed; the claim uses it.

        Args:
            group: The group.
            step: The step.

        Returns:
            From 1 to C; C is dense.
        """

    @abstractmethod
    def choose(self, score_C: torch.Tensor | None, group: ChannelGroup, step: Step) -> torch.Tensor:
        """Choose the channels that are computed; not called if ``count`` returns C.

        Args:
            score_C: The norm of each channel over the non-padding positions that may leave it out, at least 0. For
                ``mlp`` the norm of the hidden state. For ``qk`` the norm of key times that of query, the mean over its
                heads. For ``vo`` the norm of value. None if nothing is estimated.
            group: The group.
            step: The step; ``step.generator(group)`` is the only source of randomness allowed.

        Returns:
            ``index_K``, int64: the channels, ascending, each once, on any device.
        """


def _find_facts(policy: ChannelSelector) -> Mapping[str, object]:
    return {
        "keeps_outputs": policy.keeps_outputs and not policy.exact,
        "needs_num_steps": "its dense steps are a share of the training" if policy.needs_num_steps else "",
    }


CHANNEL_SELECTOR = Kind(
    ChannelSelector,
    asked="Decides in the forward of training, layer by layer, for all positions of the micro-batch that may leave "
    "channels out. Exact if all channels are computed, else biased: what is trained is another model than the one that "
    "is evaluated.\n",
    extensions=((Kind.OF_PACKAGES, "sparsebp_shelf.channel.extension:ChannelExtension"),),
    suite="sparsebp_shelf.channel.suite:check_channel_selector",
    keeps_state=False,
    facts=_find_facts,
    limits=(
        rule.not_beside(
            rule.AllBut(("ParameterSelector",)),
            "They know linears, rows and losses of the whole forward, of which some channels are not computed.",
        ),
        rule.at_linears("Nodes are those of the model's own products."),
        rule.not_with(
            "segments", rule.GIVEN, "segments first run the layers without gradients, where no channel is skipped"
        ),
        rule.Rule(
            "{policy} skips channels of frozen weights, so only adapters can train: needs model.lora, got null",
            options={"lora": rule.ABSENT},
        ),
        rule.Rule(
            "{policy} keeps all channels at output positions, and all positions of a text are outputs: needs "
            "{format:completion} or classification, or outputs: sparse, got {format:=}",
            policy={"keeps_outputs": (True,)},
            options={"format": ("text",)},
        ),
        rule.whole_weights(),
        rule.not_compiled("what is computed differs by step"),
        rule.in_trainer_not_with("torch_compile", (True,), "torch_compile: what is computed differs by step"),
    ),
)
