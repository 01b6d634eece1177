"""Train a part of each weight and freeze the rest: rows, columns, square blocks or single entries, chosen once.

Rows and columns with the same channels on both sides of an MLP: Xinyu Yang et al., "S2FT: Efficient, Scalable and
Generalizable LLM Fine-tuning by Structured Sparsity" (NeurIPS 2024), https://arxiv.org/abs/2412.06289. Blocks by the
mean magnitude of their gradients: Haoze He et al., "SMT: Fine-Tuning Large Language Models with Sparse Matrices" (ICLR
2025), https://arxiv.org/abs/2405.15525. Entries by the magnitudes of theirs: Weixi Song et al., "Sparse is Enough in
Fine-tuning Pre-trained Large Language Models" (SIFT, ICML 2024), https://arxiv.org/abs/2312.11875.

Entries of the weights under low-rank adapters, which are trained beside them (``of: frozen``): Mahdi Nikdan, Soroush
Tabesh, Elvir Crncevic and Dan Alistarh, "RoSA: Accurate Parameter-Efficient Fine-Tuning via Robust Adaptation" (ICML
2024), https://arxiv.org/abs/2401.04679.

We differ. Channels are chosen singly, not whole heads of an attention, and the chosen ones are copied, not moved next
to each other. SMT trains the whole model for 100 steps to see gradients; we take those of ``batches`` batches at the
first weights, which costs as many dense passes and trains nothing. SIFT's published hook takes the gradient of another
parameter than it says; ours takes the parameter's own. RoSA trains the adapters alone for a while and takes squares of
gradients by default; we take magnitudes, at the first weights, where the adapters add nothing. All other parameters are
frozen, biases included; with ``of: frozen`` those that the user trains are not.

Cost: forward and dgrad stay dense, so a step takes at least two thirds of a dense one; wgrad is computed for rows,
columns and blocks only, and for entries whole. The optimizer has state for the part alone. Of the input, columns and
blocks save the features that they read; rows and entries save all of it. Use it where the optimizer's state does not
fit, as an alternative to LoRA that adds no layer. Do not use it to save time: nothing below 2/3 can come of it.

Shape letters: D input width, O output width, C channels, blocks or entries of a group, K kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, final

from pydantic import Field, PositiveInt, model_validator

from sparsebp_cli.errors import PolicyError, did_you_mean
from sparsebp_cli.policy import (
    MethodCard,
    Observation,
    Observed,
    PartSelector,
    Stateful,
    Step,
    TrainedWeight,
    TrialPass,
    WeightBlocks,
    WeightColumns,
    WeightElements,
    WeightPart,
    WeightRows,
    choice,
)
from sparsebp_cli.policy.contract import State

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["rows", "columns", "blocks", "elements"]
_KINDS: tuple[Kind, ...] = ("rows", "columns", "blocks", "elements")


@dataclass(frozen=True)
class _Group:
    """Weights of which one choice is made; the name, under which it is drawn, is that of the first."""

    name: str
    members: tuple[tuple[TrainedWeight, Kind], ...]
    is_joint: bool  # whether all have the same channels; otherwise their blocks or entries compete


@final
class Subnet(Stateful[TrainedWeight], PartSelector):
    """Train rows, columns, blocks or entries of weights, by gradient, by weight or at random."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where optimizer state does not fit, instead of LoRA and without its layers. Not to save time: forward and "
        "dgrad stay whole.",
        year=2024,
        saves=("memory",),
        work="(2 + keep) / 3",
        memory="Optimizer state of the part; for columns and blocks the features of the input that they read, for rows "
        "and entries the whole input.",
        claimed="S2FT: 1.9 and 1.3 points better than LoRA on commonsense and arithmetic reasoning. SMT: better than "
        "LoRA and DoRA on LLaMA 7B and 13B. SIFT: near full fine-tuning with 5 % of the entries.",
        code="S2FT, SMT and SIFT: no licence found; SIFT's hook takes the gradient of another parameter.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.1, description="Share of the rows, columns, blocks or entries that is trained, in (0, 1]; at least one."
    )
    rows: list[str] | None = Field(
        None,
        description="Linears of which rows of the weight are trained: globs over names, such as `*.up_proj`. Without "
        "any of rows, columns, blocks and elements: rows of all linears.",
    )
    columns: list[str] | None = Field(None, description="The same for columns, such as `*.down_proj`.")
    blocks: list[str] | None = Field(None, description="The same for square blocks.")
    elements: list[str] | None = Field(None, description="The same for single entries.")
    block_size: PositiveInt = Field(256, description="Side of a block; both widths of a weight are multiples of it.")
    coupled: bool = Field(
        False,
        description="Whether all chosen linears of one parent module have the same channel numbers, rows and columns "
        "alike.",
    )
    scope: Literal["weight", "model"] = Field(
        "weight", description="Where blocks or entries compete: in each weight, or in all of them together."
    )
    of: Literal["trained", "frozen"] = Field(
        "trained",
        description="trained: parts of weights that would be trained, and all else is frozen. frozen: of those that "
        "are frozen, as under adapters (`*.base_layer`), and all else is trained as it was.",
    )
    by: Literal["gradient", "weight", "random"] = Field(
        "gradient",
        description="What is chosen: the largest sums of magnitudes of the gradient, the largest 2-norms of the "
        "weight, or an even draw, the control.",
    )
    batches: PositiveInt = Field(1, description="Micro-batches whose gradients are added up for `by: gradient`.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        for kind in given:
            if not getattr(self, kind):
                raise ValueError(f"{kind} names no linear: leave it out, or give patterns")
        if self.coupled and set(given) != {"rows", "columns"}:
            raise ValueError("coupled needs rows and columns, and nothing else")
        if (self.scope == "model" and len(given) != 1) or (self.scope == "model" and given[0] in ("rows", "columns")):
            raise ValueError("scope: model needs blocks alone or elements alone, which are of one size")
        return self

    @property
    def of_frozen(self) -> bool:
        return self.of == "frozen"

    @property
    def control(self) -> dict[str, object] | None:
        return None if self.by == "random" else {"name": "subnet", **self.model_dump(mode="json"), "by": "random"}

    @property
    def observes(self) -> frozenset[Observed]:
        return frozenset({"weight_gradient"}) if self.has_trials else frozenset()

    @property
    def has_trials(self) -> bool:
        return self.by == "gradient"

    def wants_trials(self, step: Step) -> Sequence[TrialPass]:
        return [TrialPass(batch) for batch in range(self.batches)] if self.has_trials and step.index == 0 else ()

    def init(self, places: Sequence[TrainedWeight], /) -> State:
        import torch

        if self.by == "random":
            return {}
        if self.by == "gradient":  # evenly spread until the trial passes before the first step replace it
            sizes = {group.name: (self._count(group), self._number(group)) for group in self._groups(places)}
            return {name: torch.arange(count) * number // count for name, (count, number) in sizes.items()}
        return self._choose([replace(place, matrix_OD=place.matrix_OD.float().square()) for place in places])

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002 - a contract
        return state

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        seen: dict[str, Tensor] = {}
        for observation in observations:
            for name, gradient_OD in observation.weight_gradient.items():
                magnitude_OD = gradient_OD.float().abs()
                seen[name] = seen[name] + magnitude_OD if name in seen else magnitude_OD
        return self._choose([TrainedWeight(name, None, magnitude_OD) for name, magnitude_OD in seen.items()])

    def parts(self, weights: Sequence[TrainedWeight], step: Step) -> Mapping[str, WeightPart]:
        import torch

        found: dict[str, WeightPart] = {}
        for group in self._groups(weights):
            if self.by == "random":
                index_K = torch.randperm(self._number(group), generator=step.generator(group))[: self._count(group)]
                index_K = index_K.sort().values
            else:
                kept = step.state[group.name]
                assert isinstance(kept, torch.Tensor)
                index_K = kept
            start = 0
            for weight, kind in group.members:
                own_K = index_K
                if not group.is_joint:
                    end = start + self._channels(weight, kind)
                    own_K = index_K[(index_K >= start) & (index_K < end)] - start
                    start = end
                if own_K.numel():
                    found[weight.name] = self._part(weight, kind, own_K.to(weight.matrix_OD.device))
        return found

    def _choose(self, scored: Sequence[TrainedWeight]) -> State:
        """Return the numbers of the largest sums of scores of each group, ascending; equal ones in their order."""
        import torch

        chosen: dict[str, Tensor | float] = {}
        for group in self._groups(scored):
            count = self._count(group)
            sums = [self._sum(weight.matrix_OD, kind) for weight, kind in group.members]
            score_C = torch.stack(sums).sum(0) if group.is_joint else torch.cat(sums)
            order_C = score_C.argsort(descending=True, stable=True)
            chosen[group.name] = order_C[:count].sort().values
        return chosen

    def _sum(self, score_OD: Tensor, kind: Kind) -> Tensor:
        """Return the sum over each row, column, block or entry, (C,)."""
        if kind == "elements":
            return score_OD.reshape(-1)
        if kind == "blocks":
            return choice.sum_blocks(score_OD, (self.block_size, self.block_size)).reshape(-1)
        return score_OD.sum(1 if kind == "rows" else 0)

    def _part(self, weight: TrainedWeight, kind: Kind, index_K: Tensor) -> WeightPart:
        if kind == "blocks":
            return WeightBlocks(index_K, weight.num_inputs, self.block_size)
        if kind == "elements":
            return WeightElements(index_K, weight.num_inputs)
        return (WeightRows if kind == "rows" else WeightColumns)(index_K)

    def _channels(self, weight: TrainedWeight, kind: Kind) -> int:
        if kind == "blocks":
            for width, what in ((weight.num_outputs, "outputs"), (weight.num_inputs, "inputs")):
                if width % self.block_size:
                    raise PolicyError(
                        f"blocks: {weight.name!r} has {width} {what}, no multiple of block_size: {self.block_size}"
                    )
        sizes = {
            "rows": weight.num_outputs,
            "columns": weight.num_inputs,
            "blocks": weight.num_outputs * weight.num_inputs // self.block_size**2,
            "elements": weight.num_outputs * weight.num_inputs,
        }
        return sizes[kind]

    def _number(self, group: _Group) -> int:
        """Return the number of channels, blocks or entries of a group."""
        numbers = [self._channels(weight, kind) for weight, kind in group.members]
        if not group.is_joint:
            return sum(numbers)
        if len(set(numbers)) > 1:
            widths = ", ".join(f"{n} of {w.name!r}" for n, (w, _) in zip(numbers, group.members, strict=True))
            raise PolicyError(f"coupled parts need the same number of channels, got {widths}")
        return numbers[0]

    def _count(self, group: _Group) -> int:
        return choice.count_kept(self.keep, self._number(group))

    def _groups(self, weights: Sequence[TrainedWeight]) -> list[_Group]:
        """Return the groups in the model's order."""
        members: dict[str, list[tuple[TrainedWeight, Kind]]] = {}
        kinds = self._match([weight.name for weight in weights])
        for weight in weights:
            if weight.name in kinds:
                parent = weight.name.rpartition(".")[0]
                key = "" if self.scope == "model" else parent if self.coupled else weight.name
                members.setdefault(key, []).append((weight, kinds[weight.name]))
        for group in members.values():
            if self.coupled and len({kind for _, kind in group}) == 1:
                (weight, kind), *_ = group
                other = "columns" if kind == "rows" else "rows"
                raise PolicyError(f"coupled: {weight.name!r} has no linear with {other} beside it in its module")
        return [_Group(group[0][0].name, tuple(group), self.scope == "weight") for group in members.values()]

    def _match(self, names: Sequence[str]) -> dict[str, Kind]:
        patterns: dict[Kind, list[str]] = {kind: getattr(self, kind) or [] for kind in _KINDS}
        if not any(patterns.values()):
            return dict.fromkeys(names, "rows")
        kinds: dict[str, Kind] = {}
        for kind, given in patterns.items():
            for pattern in given:
                matched = [name for name in names if fnmatchcase(name, pattern)]
                if not matched:
                    raise PolicyError(
                        f"{kind}: {pattern!r} matches no linear of whose weight a part can be trained"
                        f"{did_you_mean(pattern, names)}"
                    )
                for name in matched:
                    if kinds.setdefault(name, kind) != kind:
                        raise PolicyError(f"{name!r} is in {kinds[name]} and in {kind}: a linear has one part")
        return kinds
