"""Which rows of a batch are computed, which with a graph, and which reach the head.

Shape letters: B examples, T positions, K rows that carry gradient, R of them trained, N trained rows of all examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsebp_cli.backward.selection.token.rows import RowNumbers
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.token import TokenChoice

IGNORED = -100  # a label that trains nothing, as in PyTorch's cross entropy


@dataclass(frozen=True)
class PositionMask:
    """What is known of every position of a batch, on the CPU, all (B, T).

    Args:
        target: Whether the labels train the position's prediction.
        real: Whether the position is no padding.
        trained: Whether its loss counts.
        carries: Whether it carries gradient, as the policy chose.
        looks_on: Whether a position of the example may look at later ones, (B, 1).
    """

    target: Tensor
    real: Tensor
    trained: Tensor
    carries: Tensor
    looks_on: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether nothing can be left out: all targets are trained, each real position but an example's last is one."""
        follows = torch.zeros_like(self.real)
        follows[:, :-1] = self.real[:, 1:]
        return bool((self.trained == self.target).all() and (self.trained | ~(self.real & follows)).all())


@dataclass(frozen=True)
class RowPlan:
    """The rows of one forward.

    Args:
        carried: Computed with a graph, in the order of their positions.
        dropped: Computed without one, since carried rows look at their keys; None: there are none.
        is_prompt: Whether every dropped position precedes every carried one of its example.
        trained: Whose outputs the head reads, as numbers of carried rows.
        asked: The same, as positions.
        label_N: What they predict, example by example.
        num_trained: N, without the one row that stands in for none.
        counts: Carried, dropped and trained rows of each example, (B,) each, float64, on the CPU.
        is_joined: Whether the examples stand one after the other as one, so that none is filled up; positions then go
            on from one to the next, b * T + t.
    """

    carried: RowNumbers
    dropped: RowNumbers | None
    is_prompt: bool
    trained: RowNumbers
    asked: RowNumbers
    label_N: Tensor
    num_trained: int
    counts: tuple[Tensor, Tensor, Tensor]
    is_joined: bool


def read_marks(choice: TokenChoice, labels_BT: Tensor, mask: Tensor | None, implementation: str) -> PositionMask:
    """Bring a choice to the CPU, and check it.

    Args:
        choice: The policy's.
        labels_BT: As the model takes them: position t predicts the label at t + 1.
        mask: The model's ``attention_mask``; only one of two dimensions tells padding.
        implementation: transformers' name of the attention function.

    Returns:
        What is known of every position.

    Raises:
        UsageError: The choice is not what a token selector may return.
    """
    labels = labels_BT.cpu()
    target = torch.zeros_like(labels, dtype=torch.bool)
    target[:, :-1] = labels[:, 1:] != IGNORED
    real = torch.ones_like(target) if mask is None or mask.dim() != 2 else mask.cpu().bool()
    for name in ("trained_BT", "carries_BT"):
        given = getattr(choice, name)
        if given.dtype != torch.bool or given.shape != target.shape:
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            raise UsageError(f"{name} of a TokenChoice must be torch.bool of shape {tuple(target.shape)}, got {got}")
    trained, carries = choice.trained_BT.cpu(), choice.carries_BT.cpu()
    if (trained & ~target).any():
        raise UsageError(f"trained_BT holds {int((trained & ~target).sum())} positions that the labels do not train")
    if (trained & ~carries).any():
        raise UsageError(f"{int((trained & ~carries).sum())} trained positions are not among those of carries_BT")
    # A mask of the user's own may allow anything; and where eager attention may look at nothing, which only padding may
    # not, it looks at everything.
    looks_on = (trained & ~real).any(1, keepdim=True) & (implementation == "eager")
    return PositionMask(target, real, trained, carries, looks_on | (mask is not None and mask.dim() == 4))


def make_plan(marks: PositionMask, labels_BT: Tensor, mode: Literal["exact", "detach"], pair_cost: float) -> RowPlan:
    """Say which rows are computed, and how.

    Args:
        marks: Of the batch.
        labels_BT: As the model takes them.
        mode: ``exact``: all rows up to the last trained one of the batch carry gradient; ``detach``: those that the
            policy chose.
        pair_cost: Of a query and a key, over that of a row in the linears of a layer.

    Returns:
        The plan.
    """
    device, num_trained = labels_BT.device, int(marks.trained.sum())
    trained = marks.trained.clone()
    if num_trained == 0:  # a forward must compute something; its loss is multiplied by 0
        trained[0, 0] = True
    length = trained.shape[1]
    last_B1 = (trained * torch.arange(length)).amax(1, keepdim=True)
    reaches = torch.arange(length) <= last_B1
    needed = ((marks.real | trained) & reaches | marks.looks_on) & trained.any(1, keepdim=True)
    if mode == "exact":  # columns, so that rows stay where they are and the kernels are the model's own
        carried_BT, dropped_BT = needed.any(0).expand_as(trained), torch.zeros_like(trained)
    else:
        carried_BT, dropped_BT = needed & (marks.carries | trained), needed & ~(marks.carries | trained)
    is_prompt = _is_prompt(carried_BT, dropped_BT) and not bool(marks.looks_on.any())
    counts = tuple(part.sum(1).double() for part in (carried_BT, dropped_BT, trained))
    is_joined = mode == "detach" and _joining_pays(counts[0], counts[1], pair_cost, is_prompt=is_prompt)
    if is_joined:
        carried_BT, dropped_BT, trained, needed = (
            part.reshape(1, -1) for part in (carried_BT, dropped_BT, trained, needed)
        )
    carried, dropped = RowNumbers.of(carried_BT, device, valid_BT=needed), RowNumbers.of(dropped_BT, device)
    assert carried is not None
    trained_BK = trained.gather(1, carried.position_BK.cpu()) & carried.valid_BK.cpu()
    rows = RowNumbers.of(trained_BK, device)
    assert rows is not None
    label_N = labels_BT.roll(-1, 1)[trained.view_as(labels_BT).to(device)]
    if num_trained == 0:
        label_N = label_N.clamp(min=0)
    asked = carried.among(rows)
    return RowPlan(
        carried, dropped, is_prompt, rows, asked, label_N, num_trained, (counts[0], counts[1], counts[2]), is_joined
    )


def _joining_pays(carried_B: Tensor, dropped_B: Tensor, pair_cost: float, *, is_prompt: bool) -> bool:
    """Whether the pairs of unlike examples, all masked, cost less than filling up every example to the longest."""

    def cost(carried: float, dropped: float) -> float:
        keys = carried + dropped
        beside = dropped * (1.0 + pair_cost * (dropped if is_prompt else keys))
        return 3.0 * carried * (1.0 + pair_cost * keys) + beside  # with a backward of twice its forward

    filled = len(carried_B) * cost(float(carried_B.max()), float(dropped_B.max()))
    return cost(float(carried_B.sum()), float(dropped_B.sum())) < filled


def _is_prompt(carried_BT: Tensor, dropped_BT: Tensor) -> bool:
    length = carried_BT.shape[1]
    position_T = torch.arange(length)
    first_B = torch.where(carried_BT, position_T, length).amin(1)
    last_B = torch.where(dropped_BT, position_T, -1).amax(1)
    return bool((last_B < first_B).all())
