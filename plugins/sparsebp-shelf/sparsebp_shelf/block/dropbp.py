"""Leave residual blocks out of the backward at random; attention and MLP count as separate blocks.

Sunghyeon Woo, Baeseong Park, Byeongwook Kim, Minjung Jo, Se Jung Kwon, Dongsuk Jeon and Dongsoo Lee, "DropBP:
Accelerating Fine-Tuning of Large Language Models by Dropping Backward Propagation" (NeurIPS 2024),
https://arxiv.org/abs/2402.17812. With `sensitivity_at` the rates follow the paper, which measures them after a tenth of
its training. The more the gradient norms of the parameters change when a block is dropped alone, the less often the
block is dropped. We differ in four points. Without `sensitivity_at` all blocks have the same rate, without trial
passes. Each step drops as many blocks as the rates give; the paper draws each block separately, and drops more if these
are too few. We measure a block's work by its weights only. Our policy chooses before the step; the paper's code draws
inside the module, so checkpointing may draw differently when it repeats a forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, final

from pydantic import Field, model_validator

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import (
    Measure,
    MethodCard,
    Observation,
    Observed,
    ParameterGradient,
    Stateful,
    Step,
    choice,
)
from sparsebp_shelf import sampling
from sparsebp_shelf.block.kind import BlockDropper, DropDraw, ResidualBlock

if TYPE_CHECKING:
    from sparsebp_cli.policy import State

UNIT = 10  # rates are multiples of 1 / UNIT, at most 9 / UNIT


@final
class DropBP(Stateful[ResidualBlock], BlockDropper):
    """Drop residual blocks from the backward, different ones at each step."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="If steps must be faster or need less memory, and the model has residual blocks. Compare with dense "
        "training with a smaller batch at the same cost.",
        year=2024,
        saves=("time", "memory"),
        work="(1 + 2 * keep) / 3",
        memory="Nothing of a dropped block.",
        claimed="44 % less training time, and sequences 6.2 times as long; LLaMA-2 with QLoRA.",
        measured="1.47 and 1.90 times as fast as dense at keep 0.5 and 0.25 (results, measurements). At the cost of "
        "60 dense steps, dense with a smaller batch was better (log, 2026-11-23).",
        code="WooSunghyeon/dropbp, MIT; its code draws the blocks again if checkpointing repeats a forward.",
    )

    constants: ClassVar[tuple[str, ...]] = ("sensitivity_at",)

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description=(
            "Fraction of the residual blocks whose backward runs, in (0, 1]; 1.0 is dense. If the fraction is not a "
            "whole number of blocks, one more block runs at some steps, so that the mean is this fraction."
        )
    )
    sensitivity_at: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None,
        description=(
            "Fraction of the training's steps after which SparseBP measures how much each block matters, with one "
            "trial pass per block and a dense one. From then on, keep is a fraction of the blocks' FLOPs, not of "
            "their number. The paper: 0.1. null: drop all blocks equally often."
        ),
    )

    @model_validator(mode="after")
    def _can_be_shared_out(self) -> Self:
        if self.sensitivity_at is not None and not 1.0 / UNIT <= self.keep < 1.0:
            raise ValueError(
                f"with sensitivity_at, keep must be in [{1 / UNIT}, 1), got {self.keep}: each block is dropped in at "
                "most nine of ten steps"
            )
        return self

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def is_identical(self) -> bool:
        return self.sensitivity_at is None

    @property
    def has_trials(self) -> bool:
        return self.sensitivity_at is not None

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.sensitivity_at is None else frozenset({ParameterGradient})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:  # noqa: ARG002
        assert isinstance(seen, ParameterGradient)
        return {"norm": Measure(choice.l2_norm(seen.gradient))}

    @property
    def control(self) -> dict[str, object] | None:
        return None if self.sensitivity_at is None else {"name": "dropbp", "keep": self.keep}

    def init(self, places: Sequence[ResidualBlock], /) -> State:
        return {} if self.sensitivity_at is None else {block.name: -1.0 for block in places}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        return state

    def wants_trials(self, step: Step) -> Sequence[Collection[str]]:
        if self.sensitivity_at is None:
            return ()
        if step.num_steps is None:
            raise PolicyError(
                "sensitivity_at is a fraction of the training's steps: pass the number of steps to attach(..., "
                "num_steps=...)"
            )
        return (
            [(), *((name,) for name in step.state)] if step.index == int(self.sensitivity_at * step.num_steps) else ()
        )

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        import torch

        whole = observations[0]["norm"]
        measured = []
        for observation in observations[1:]:
            norms = observation["norm"]  # parameters of the dropped block have no norm here
            terms = [(size - norms.get(name, 0.0)) ** 2 for name, size in whole.items()]
            measured.append(torch.stack(terms).double().sum())
        return dict(zip(state, torch.stack(measured).tolist(), strict=True))

    def drop(self, blocks: Sequence[ResidualBlock], step: Step) -> Collection[str]:
        if self.exact:
            return ()
        import torch

        generator = step.generator(DropDraw())
        if self.sensitivity_at is None or min(float(value) for value in step.state.values()) < 0.0:
            fraction = float(torch.rand((), generator=generator, dtype=torch.float64))
            number = int((1.0 - self.keep) * len(blocks) + fraction)  # rounded up at random, so the mean is right
            order = torch.randperm(len(blocks), generator=generator)
            return [blocks[place].name for place in order[:number].tolist()]
        sensitivities = [float(step.state[block.name]) for block in blocks]
        tenths = share_out(sensitivities, [float(block.num_weights) for block in blocks], self.keep)
        number = ceil(sum(tenths) / UNIT)
        # The last entry stands for "no block", so that the mean number of dropped blocks follows the rates.
        rates = torch.tensor([*tenths, number * UNIT - sum(tenths)], dtype=torch.float64) / UNIT
        drawn = sampling.draw(rates, number, generator).tolist() if number else []
        return [blocks[place].name for place in drawn if place < len(blocks)]


def share_out(sensitivity_J: Sequence[float], work_J: Sequence[float], keep: float) -> list[int]:
    """Return how often each block is dropped, in tenths of the steps, so that at most ``keep`` of the work remains.

    The function raises the rate of the block whose next tenth costs least, until enough work is dropped. A rate costs
    itself times the block's sensitivity.

    Args:
        sensitivity_J: Cost of each block's drops per unit of their rate, at least 0.
        work_J: Work of each block, above 0, in any unit.
        keep: Fraction of the work that may remain, in [0.1, 1).

    Returns:
        (J,), each in [0, 9].
    """
    tenths = [0] * len(work_J)
    # The factor keeps rounding from missing the allowed work.
    allowed = keep * sum(work_J) * (1 + 1e-9)
    while sum(work * (UNIT - tenth) for work, tenth in zip(work_J, tenths, strict=True)) / UNIT > allowed:
        open_blocks = [place for place, tenth in enumerate(tenths) if tenth < UNIT - 1]
        tenths[min(open_blocks, key=lambda place: (tenths[place] + 1) * sensitivity_J[place])] += 1
    return tenths
