"""Train a part of each weight and freeze the rest: rows, columns, square blocks or single entries, chosen once.

Rows and columns with the same channels on both sides of an MLP: Xinyu Yang et al., "S2FT: Efficient, Scalable and
Generalizable LLM Fine-tuning by Structured Sparsity" (NeurIPS 2024), https://arxiv.org/abs/2412.06289. Blocks by the
mean magnitude of their gradients: Haoze He et al., "SMT: Fine-Tuning Large Language Models with Sparse Matrices" (ICLR
2025), https://arxiv.org/abs/2405.15525. Entries by the magnitude of their gradients: Weixi Song et al., "Sparse is
Enough in Fine-tuning Pre-trained Large Language Models" (SIFT, ICML 2024), https://arxiv.org/abs/2312.11875. Entries of
the weights under trained low-rank adapters (``of: frozen``): Mahdi Nikdan, Soroush Tabesh, Elvir Crncevic and Dan
Alistarh, "RoSA: Accurate Parameter-Efficient Fine-Tuning via Robust Adaptation" (ICML 2024),
https://arxiv.org/abs/2401.04679.

We differ. Our policy chooses single channels, not whole attention heads, and copies them; S2FT moves them next to each
other. SMT trains the whole model for 100 steps to see gradients; we take gradients of ``batches`` batches at the
initial weights, which costs one dense pass per batch. RoSA first trains the adapters alone and squares gradients by
default; we take magnitudes at the initial weights, where the adapters add nothing. We freeze all other parameters, also
biases. With ``of: frozen``, parameters that you train stay trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, final

from pydantic import Field, PositiveInt, model_validator

from sparsebp_cli.policy import Measure, MethodCard, Observation, Observed, Stateful, Step, TrialPass
from sparsebp_shelf.part.kind import PartSelector, TrainedWeight, WeightGradient
from sparsebp_shelf.part.weight_group import KINDS, WeightGroup, group_weights, sum_magnitudes
from sparsebp_shelf.part.weight_part import WeightPart

if TYPE_CHECKING:
    from sparsebp_cli.policy import State


@final
class Subnet(Stateful[TrainedWeight], PartSelector):
    """Train rows, columns, blocks or entries of weights, by gradient, by weight or at random."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Instead of LoRA, if optimizer state does not fit into memory: subnet adds no layers. Not to save time: "
        "the forward and gradients of inputs stay dense. For single entries, gradients of weights stay dense, too.",
        year=2024,
        saves=("memory",),
        work="(2 + keep) / 3",
        memory="Optimizer state of the part. For columns and blocks, only the input features that they read; for "
        "rows and entries, the whole input.",
        claimed="S2FT: 1.9 and 1.3 points better than LoRA on commonsense and arithmetic reasoning. SMT: better than "
        "LoRA and DoRA on LLaMA 7B and 13B. SIFT: close to full fine-tuning with 5 % of the entries.",
        code="S2FT, SMT and SIFT: no licence found; SIFT's hook uses the gradient of the wrong parameter.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.1,
        description=(
            "Fraction of the rows, columns, blocks or entries that is trained, in (0, 1]. At least one is trained."
        ),
    )
    rows: list[str] | None = Field(
        None,
        description=(
            "Linear layers in which rows of the weight are trained: globs over names, such as `*.up_proj`. null: "
            "none. If rows, columns, blocks and elements are all null, rows of all linear layers are trained."
        ),
    )
    columns: list[str] | None = Field(
        None,
        description=(
            "Linear layers in which columns of the weight are trained: globs over names, such as `*.down_proj`. null: "
            "none."
        ),
    )
    blocks: list[str] | None = Field(
        None,
        description="Linear layers in which square blocks of the weight are trained: globs over names. null: none.",
    )
    elements: list[str] | None = Field(
        None,
        description="Linear layers in which single entries of the weight are trained: globs over names. null: none.",
    )
    block_size: PositiveInt = Field(
        256,
        description=(
            "Number of rows and of columns of a block. The weight's rows and columns must be multiples of this number."
        ),
    )
    coupled: bool = Field(
        False,
        description=(
            "Whether the chosen linear layers of a module train the same channels. Rows of `up_proj` and columns of "
            "`down_proj` then have the same numbers."
        ),
    )
    scope: Literal["weight", "model"] = Field(
        "weight",
        description=(
            "How blocks or entries are ranked. weight: within each weight, so that each weight trains the same "
            "fraction. model: over all chosen weights together."
        ),
    )
    of: Literal["trained", "frozen"] = Field(
        "trained",
        description=(
            "trained: train parts of the trainable weights and freeze everything else. frozen: train parts of "
            "frozen weights, such as `*.base_layer` under adapters; trainable parameters stay trained."
        ),
    )
    by: Literal["gradient", "weight", "random"] = Field(
        "gradient",
        description=(
            "gradient: train the parts with the largest sum of absolute gradients. weight: train the parts with the "
            "largest 2-norm. random: draw the parts with equal probabilities, as a control."
        ),
    )
    batches: PositiveInt = Field(
        1,
        description=(
            "With 'by: gradient': number of micro-batches whose absolute gradients are summed to choose the parts."
        ),
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if empty := [kind for kind in given if not getattr(self, kind)]:
            raise ValueError(
                f"{empty[0]} must name at least one linear layer, got an empty list: leave the key out, or give "
                "patterns"
            )
        if self.coupled and set(given) != {"rows", "columns"}:
            raise ValueError("'coupled: true' needs the options rows and columns, without blocks and elements")
        if self.scope == "model" and given not in (["blocks"], ["elements"]):
            raise ValueError("'scope: model' ranks only parts of equal size: give either only blocks or only elements")
        return self

    @property
    def of_frozen(self) -> bool:
        return self.of == "frozen"

    @property
    def control(self) -> dict[str, object] | None:
        return None if self.by == "random" else {"name": "subnet", **self.model_dump(mode="json"), "by": "random"}

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset({WeightGradient}) if self.has_trials else frozenset()

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:  # noqa: ARG002
        assert isinstance(seen, WeightGradient)
        return {"magnitude": Measure(seen.gradient_OD.float().abs())}

    @property
    def has_trials(self) -> bool:
        return self.by == "gradient"

    def wants_trials(self, step: Step) -> Sequence[TrialPass]:
        return [TrialPass(batch) for batch in range(self.batches)] if self.has_trials and step.index == 0 else ()

    def init(self, places: Sequence[TrainedWeight], /) -> State:
        if self.by == "weight":
            return self._choose([replace(place, matrix_OD=place.matrix_OD.float().square()) for place in places])
        # By gradient: start with evenly spread units, which the trial passes before the first step replace.
        groups = self._groups(places) if self.by == "gradient" else []
        return {group.name: group.spread(self.keep) for group in groups}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        return state

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        return self._choose(sum_magnitudes(observations))

    def parts(self, weights: Sequence[TrainedWeight], step: Step) -> Mapping[str, WeightPart]:
        import torch

        found: dict[str, WeightPart] = {}
        for group in self._groups(weights):
            if self.by == "random":
                found |= group.split(group.draw(self.keep, step.generator(group)))
            else:
                found |= group.split(torch.as_tensor(step.state[group.name]))
        return found

    def _choose(self, scored: Sequence[TrainedWeight]) -> State:
        return {group.name: group.find_largest(self.keep) for group in self._groups(scored)}

    def _groups(self, weights: Sequence[TrainedWeight]) -> list[WeightGroup]:
        patterns = {kind: getattr(self, kind) or [] for kind in KINDS}
        return group_weights(weights, patterns, self.block_size, coupled=self.coupled, whole=self.scope == "model")
