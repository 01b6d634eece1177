"""Plans which rows of a batch are computed, which have a graph, and which reach the head.

Shape letters: B examples, T positions, K rows that carry gradient, R of them trained, N trained rows of all examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebp_cli.backward.core.loss_weight import IGNORED
from sparsebp_cli.backward.kind.token.rows import RowNumbers
from sparsebp_cli.backward.kind.transfer import upload
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.token import TokenChoice, TokenMode


@dataclass(frozen=True)
class PositionMask:
    """Properties of every position of a batch, as (B, T) tensors on the CPU."""

    target: Tensor  # the position's prediction has a label
    real: Tensor  # it is not padding
    trained: Tensor  # its loss counts
    carries: Tensor  # the policy lets it carry gradient
    attends_later: Tensor  # (B, 1): positions of the example may attend to later ones

    @property
    def is_whole(self) -> bool:
        """Whether no position can be skipped: all targets are trained, and every real position but an example's last
        is a target.
        """
        follows = torch.zeros_like(self.real)
        follows[:, :-1] = self.real[:, 1:]
        return bool((self.trained == self.target).all() and (self.trained | ~(self.real & follows)).all())


@dataclass(frozen=True)
class RowPlan:
    """The rows of one forward."""

    carried: RowNumbers  # computed with a graph, in the order of their positions
    dropped: RowNumbers | None  # computed without a graph, because carried rows attend to them; None: no such rows
    is_prompt: bool  # in every example all dropped positions precede all carried ones
    trained: RowNumbers  # rows that the head reads, as indices into the carried rows
    trained_positions: RowNumbers  # the same rows, as positions
    place_N: Tensor | None  # indices of the trained rows that are not padding; None: all
    label_N: Tensor  # labels of these rows, example by example
    num_trained: int  # N, not counting the placeholder row of a batch without trained rows
    counts: tuple[Tensor, Tensor, Tensor]  # carried, dropped and trained rows by example, (B,), float64, on the CPU
    # Whether examples are concatenated into one, so none is padded; the positions of example b are then b * T + t.
    is_joined: bool


def read_choice(
    choice: TokenChoice,
    labels_BT: Tensor,
    mask: Tensor | None,
    *,
    spreads: bool,
) -> PositionMask:
    """Move a choice to the CPU and check it, and return the properties of every position.

    Position t predicts the label at t + 1. Only a two-dimensional ``mask`` marks padding. ``spreads``: a fully masked
    row attends to all positions; only padding is fully masked. Raises :class:`UsageError` for an invalid choice.
    """
    real_BT = torch.ones_like(labels_BT) if mask is None or mask.dim() != 2 else mask
    target_BT = torch.zeros_like(labels_BT, dtype=torch.bool)
    target_BT[:, :-1] = labels_BT[:, 1:] != IGNORED
    parts = _download(target_BT, real_BT, choice.trained_BT, choice.carries_BT)
    target, real, trained, carries = (part.bool() for part in parts)
    if (trained & ~target).any():
        raise UsageError(f"trained_BT must not select positions without a label, got {int((trained & ~target).sum())}")
    if (trained & ~carries).any():
        raise UsageError(f"carries_BT lacks {int((trained & ~carries).sum())} positions of trained_BT: include them")
    # A four-dimensional mask from the user may allow anything.
    attends_later = (trained & ~real).any(1, keepdim=True) & spreads
    return PositionMask(target, real, trained, carries, attends_later | (mask is not None and mask.dim() == 4))


def _download(*tensors: Tensor) -> Sequence[Tensor]:
    """Return tensors of one shape on the CPU, by one copy, so that the host waits once. Copied ones are int64."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors
    device = next(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return torch.stack([tensor.to(device, torch.long) for tensor in tensors]).cpu().unbind()


def find_needed(marks: PositionMask) -> tuple[Tensor, Tensor]:
    """Return the trained positions, or one placeholder, and the positions to which they attend, (B, T), on the CPU."""
    trained = marks.trained.clone()
    if not bool(trained.any()):  # the forward needs one row, whose loss is multiplied by 0
        trained[0, 0] = True
    length = trained.shape[1]
    last_B1 = (trained * torch.arange(length)).amax(1, keepdim=True)
    reaches = torch.arange(length) <= last_B1
    return trained, ((marks.real | trained) & reaches | marks.attends_later) & trained.any(1, keepdim=True)


def make_plan(
    marks: PositionMask, labels_BT: Tensor, mode: TokenMode, pair_cost: float, *, joins_unequal: bool = False
) -> RowPlan:
    """Plan the rows of a batch.

    In mode ``exact`` all rows up to the batch's last trained one carry gradient; in ``detach``, the rows
    that the policy chose. ``pair_cost`` is the cost of a query-key pair over the cost of a row in a layer's linears.
    ``joins_unequal``: concatenate examples with different rows at any cost.
    """
    device, num_trained = labels_BT.device, int(marks.trained.sum())
    trained, needed = find_needed(marks)
    if mode == "exact":  # whole columns, so that rows keep their order and the model's own kernels run
        carried_BT, dropped_BT = needed.any(0).expand_as(trained), torch.zeros_like(trained)
    else:
        carried_BT, dropped_BT = needed & (marks.carries | trained), needed & ~(marks.carries | trained)
    is_prompt = _is_prompt(carried_BT, dropped_BT) and not bool(marks.attends_later.any())
    counts = tuple(part.sum(1).double() for part in (carried_BT, dropped_BT, trained))
    is_joined = mode != "exact" and (
        _joining_pays(counts[0], counts[1], pair_cost, is_prompt=is_prompt)
        or (joins_unequal and not all(bool((part == part[:1]).all()) for part in (carried_BT, dropped_BT)))
    )
    if is_joined:
        carried_BT, dropped_BT, trained, needed = (
            part.reshape(1, -1) for part in (carried_BT, dropped_BT, trained, needed)
        )
    carried, dropped = RowNumbers.of(carried_BT, valid_BT=needed), RowNumbers.of(dropped_BT)
    assert carried is not None
    rows = RowNumbers.of(trained.gather(1, carried.position_BK) & carried.valid_BK)
    assert rows is not None
    numbers = [rows, carried.among(rows), carried, *([] if dropped is None else [dropped])]
    *moved, place_N, target_N = upload(
        device,
        *(tensor for number in numbers for tensor in (number.position_BK, number.valid_BK)),
        rows.valid_BK.flatten().nonzero().flatten(),
        trained.flatten().nonzero().flatten(),
    )
    pairs = zip(moved[::2], moved[1::2], strict=True)
    rows, trained_positions, carried, *rest = (
        replace(number, position_BK=position, valid_BK=valid)
        for number, (position, valid) in zip(numbers, pairs, strict=True)
    )
    label_N = labels_BT.roll(-1, 1).flatten().index_select(0, target_N)
    if num_trained == 0:  # the placeholder's label may be ignored, and the mean over no label is NaN
        label_N = label_N.clamp(min=0)
    return RowPlan(
        carried,
        rest[0] if rest else None,
        is_prompt,
        rows,
        trained_positions,
        None if rows.is_full else place_N,
        label_N,
        num_trained,
        (counts[0], counts[1], counts[2]),
        is_joined,
    )


def _joining_pays(carried_B: Tensor, dropped_B: Tensor, pair_cost: float, *, is_prompt: bool) -> bool:
    """Return whether masked pairs between concatenated examples cost less than padding all examples to the longest."""

    def cost(carried: float, dropped: float) -> float:
        keys = carried + dropped
        dropped_cost = dropped * (1.0 + pair_cost * (dropped if is_prompt else keys))
        return 3.0 * carried * (1.0 + pair_cost * keys) + dropped_cost  # the backward costs twice the forward

    filled = len(carried_B) * cost(float(carried_B.max()), float(dropped_B.max()))
    return cost(float(carried_B.sum()), float(dropped_B.sum())) < filled


def _is_prompt(carried_BT: Tensor, dropped_BT: Tensor) -> bool:
    length = carried_BT.shape[1]
    position_T = torch.arange(length)
    first_B = torch.where(carried_BT, position_T, length).amin(1)
    last_B = torch.where(dropped_BT, position_T, -1).amax(1)
    return bool((last_B < first_B).all())
