"""Leave channels of frozen weights out of the forward of one model, and so out of its backward.

A block chooses the channels of its groups before it runs. The frozen linears in it, under their adapters, multiply
these channels only. A block that activation checkpointing runs again uses the choice of its first forward.

Shape letters: B examples, T positions, N rows (= B*T), C channels, K kept, O outputs, D inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward import (
    DensePass,
    EngineExtension,
    ForwardOverride,
    ForwardPatches,
    LayerNumbers,
    PassEstimate,
    refuse_uncalled,
)
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_shelf.channel.estimate import Estimator
from sparsebp_shelf.channel.group import Group, Member, check_adapter, find_groups
from sparsebp_shelf.channel.kind import ChannelSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given

IGNORED = -100  # the label of a position that is no target


@dataclass(frozen=True)
class _Rows:
    """The rows of a micro-batch.

    Args:
        context_N: Numbers of the rows that may leave channels out; None: all.
        output_N: Numbers of the other rows; empty if ``context_N`` is None.
        scored_N: Numbers of the context rows that are not padding.
        number: N.
    """

    context_N: Tensor | None
    output_N: Tensor
    scored_N: Tensor
    number: int

    @property
    def context_share(self) -> float:
        return 1.0 - len(self.output_N) / self.number


@final
class ChannelExtension(EngineExtension):
    """Carry out a channel selector's choices in one model.

    Raises :class:`UnsupportedError` if the model has no layers like Llama's, if their weights are trained, merged or
    quantised, or under reentrant checkpointing.
    """

    def __init__(self, policy: ChannelSelector, model: nn.Module, given: Given) -> None:  # noqa: ARG002 - as of all
        from transformers import PreTrainedModel  # slow to import, so not imported with the kind

        self.policy, name = policy, type(policy).__name__
        found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if found is None:
            raise UnsupportedError(f"{name} needs a transformers model, got {type(model).__name__}")
        self.model: Any = found
        self._groups = find_groups(model, LayerNumbers(model), name)
        self._estimator = None
        if policy.estimate != "none" and not policy.exact:
            self._estimator = Estimator(policy.estimate, policy.num_singular, self._groups)
        self._patches, self._handles = ForwardPatches(), list[RemovableHandle]()
        self._choices: dict[str, Tensor | None] = {}  # of the current forward, by group
        self._rows: _Rows | None = None  # of the last forward
        self._step: Step | None = None  # of the last forward
        self._was_called = False

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        handles = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for group in self._groups:
            handles.append(group.block.register_forward_pre_hook(partial(self._decide, group), with_kwargs=True))
            for member in group.members:
                self._patches.install(member.linear, _SomeChannels(self, group, member))
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.remove()

    @override
    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self.model)

    def count(self, group: Group) -> int:
        """Return how many channels of a group are computed at this step."""
        step = self._engine.now()
        policy = self.policy.at(step)
        kept = policy.count(group.about, step)
        if not 1 <= kept <= group.about.num_channels:
            raise PolicyError(
                f"{type(policy).__name__} counts {kept} channels, allowed: 1 to {group.about.num_channels}"
            )
        return kept

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass whose output positions are those of the last forward."""
        rows, shares, forward = self._rows, dict[str, float](), dict[str, float]()
        if rows is None:
            return PassEstimate()
        for group in self._groups:
            share = self.count(group) / group.about.num_channels
            if share == 1.0 or not rows.context_share:
                continue
            for member in group.members:
                shares[member.name] = 1.0 - rows.context_share * (1.0 - share)
                spent = 0.0 if self._estimator is None else self._estimator.cost(member)
                forward[member.name] = shares[member.name] + spent * len(rows.scored_N) / rows.number
        return PassEstimate(shares, shares, forward)

    def choice_of(self, group: Group) -> tuple[Tensor, _Rows] | None:
        """Return the channels that a group computes and the micro-batch's rows; None if it computes all."""
        index_K = self._choices.get(group.about.name) if self._is_active() else None
        return None if index_K is None else (index_K, cast("_Rows", self._rows))

    def check_adapter(self, member: Member) -> None:
        """Raise an error if the adapter was merged after the policy was attached."""
        check_adapter(member.adapter, member.name, type(self.policy).__name__)

    def _is_active(self) -> bool:
        return bool(self.model.training) and torch.is_grad_enabled() and self._engine.enabled

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        self._choices.clear()
        self._rows = None
        if module.training and torch.is_grad_enabled():
            self._rows = self._find_rows(arguments)
        if self._is_active():
            self._was_called, self._step = True, self._engine.now()
            _refuse_reentrant(self.model, type(self.policy).__name__)

    def _find_rows(self, arguments: Mapping[str, Any]) -> _Rows:
        given = arguments.get("input_ids")
        given = arguments.get("inputs_embeds") if given is None else given
        if not isinstance(given, Tensor):
            raise UsageError(f"{type(self.policy).__name__} needs input_ids or inputs_embeds among the arguments")
        labels, mask = arguments.get("labels"), arguments.get("attention_mask")
        real_BT = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            real_BT = mask.bool()
        output_BT = torch.zeros_like(real_BT)
        if self.policy.keeps_outputs and isinstance(labels, Tensor) and labels.ndim == 2:
            output_BT = labels != IGNORED
            output_BT[:, :-1] |= output_BT[:, 1:].clone()  # include the positions that predict an output
        elif self.policy.keeps_outputs and labels is None and not self.policy.exact:
            raise UsageError(
                f"{type(self.policy).__name__} needs labels among the arguments: they mark the output positions"
            )
        output_N, scored_N = (rows.flatten().nonzero()[:, 0] for rows in (output_BT, real_BT & ~output_BT))
        context_N = (~output_BT).flatten().nonzero()[:, 0] if len(output_N) else None
        return _Rows(context_N, output_N, scored_N, output_BT.numel())

    def _decide(self, group: Group, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Choose the channels of a group before its block runs."""
        if not self._is_active() or self._rows is None:
            return
        step, name = self._engine.now(), group.about.name
        if step != self._step:
            raise UsageError(
                f"{group.about.module!r} runs again after the step of its forward, with other channels: run the "
                "backward of each forward before the next one"
            )
        if name in self._choices:
            return  # activation checkpointing runs the block again
        kept = self.count(group)
        if kept == group.about.num_channels or not self._rows.context_share:
            self._choices[name] = None
            return
        hidden_BTD = args[0] if args else kwargs["hidden_states"]
        score_C = None
        if self._estimator is not None:
            score_C = self._estimator.score(group, hidden_BTD.detach().flatten(0, -2)[self._rows.scored_N])
        index_K = self.policy.at(step).choose(score_C, group.about, step)
        good = index_K.dtype == torch.int64 and index_K.shape == (kept,)
        if not good:
            raise PolicyError(f"{type(self.policy).__name__} must choose {kept} channels, int64, got {index_K.shape}")
        self._choices[name] = index_K.to(hidden_BTD.device)
        self._engine.notes["channels"] = (
            f"at step {step.index} {self._rows.context_share:.0%} of the positions skip channels of frozen "
            "weights: training and evaluation compute different models"
        )


class _SomeChannels(ForwardOverride):
    """Replace the ``forward`` of a frozen linear: multiply only the channels that its group computes."""

    def __init__(self, extension: ChannelExtension, group: Group, member: Member) -> None:
        self._extension, self._group, self._member = extension, group, member

    def __call__(self, x: Tensor) -> Tensor:
        linear = self._member.linear
        chosen = None if self.is_removed else self._extension.choice_of(self._group)
        if chosen is None:
            output: Tensor = self.run_covered(linear, x)
            return output
        self._extension.check_adapter(self._member)
        index_K, rows = chosen
        entry = self._member.entry_CG.to(index_K.device)[index_K].flatten()
        x_ND = x.flatten(0, -2)
        if rows.context_N is None:
            output_NO = self._multiply(x_ND, entry)
        else:
            context_NO = self._multiply(x_ND[rows.context_N], entry)
            outputs_NO = nn.functional.linear(x_ND[rows.output_N], linear.weight)
            output_NO = context_NO.new_zeros(len(x_ND), context_NO.shape[1])
            output_NO = output_NO.index_copy(0, rows.context_N, context_NO).index_copy(0, rows.output_N, outputs_NO)
        if linear.bias is not None:
            output_NO = output_NO + linear.bias.to(output_NO)
        return output_NO.view(*x.shape[:-1], -1)

    def _multiply(self, x_ND: Tensor, entry: Tensor) -> Tensor:
        """Multiply the chosen inputs, or compute the chosen outputs; other outputs are 0."""
        weight_OD = self._member.linear.weight
        if self._member.side == "in":
            return nn.functional.linear(x_ND[:, entry], weight_OD[:, entry])
        part = nn.functional.linear(x_ND, weight_OD[entry])
        return part.new_zeros(len(part), len(weight_OD)).index_copy(1, entry, part)


def _refuse_reentrant(model: nn.Module, asker: str) -> None:
    for module in model.modules():
        keywords = getattr(vars(module).get("_gradient_checkpointing_func"), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant", True):
            raise UnsupportedError(f"{asker} with reentrant checkpointing: enable it with use_reentrant=False")
