"""Facts that packing reads from the caller's batch, and counts over all batches.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import IGNORED, LOSS_WEIGHT
from sparsebp_cli.backward.decoder.decoder import argument_names
from sparsebp_cli.backward.kind.packing.groups import Bools, Ints, to_tensor
from sparsebp_cli.backward.kind.packing.layout import PackedLayout

BATCH = ("input_ids", "inputs_embeds", "token_type_ids")  # (B, T, ...): packing selects rows of these
KNOWN = {*BATCH, "attention_mask", "position_ids", "labels", "num_items_in_batch", "logits_to_keep"}
KNOWN |= {"use_cache", "return_dict"}
ATTENTIONS = "output_attentions"
STATES = "output_hidden_states"  # the caller may read the hidden states of every position that is not padding
SHIFTED = "shift_labels"  # labels at the position that predicts them, as under context parallelism


@dataclass(frozen=True)
class BatchFacts:
    """The facts of a batch on which masks and position numbers depend.

    They alone determine whether rows can be skipped. Verification compares each batch with new facts.
    """

    has_mask: bool
    has_positions: bool
    holds_several: bool  # an example contains several sequences
    has_gaps: bool  # there is padding between real positions
    pads_left: bool
    trains_padding: bool  # an output is read before the first real position of its example
    trains_gaps: bool  # an output is read at padding after the first real position
    has_fractions: bool  # a position number is not an integer
    follows_columns: bool  # within a sequence, position numbers and columns differ by a constant
    begins_at_zero: bool  # the first real position of each example has the number 0
    largest: int  # largest position number of the batch, including padding

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], real_BT: Bools, read_BT: Bools, position_BT: Ints, begins_BT: Bools | None
    ) -> BatchFacts:
        """Return the facts of a batch; ``begins_BT`` marks where another sequence begins."""
        started = real_BT.cumsum(1) > 0
        behind = real_BT[:, ::-1].cumsum(1)[:, ::-1] > 0
        offset = position_BT - np.arange(real_BT.shape[1])
        # Compare neighbouring real positions of one sequence, without gaps.
        sequence = np.zeros(real_BT.shape, np.int64) if begins_BT is None else begins_BT.cumsum(1)
        follows = all(
            (np.diff(offsets)[np.diff(number) == 0] == 0).all()
            for offsets, number in ((o[r], n[r]) for o, n, r in zip(offset, sequence, real_BT, strict=True))
        )
        first, given = position_BT[real_BT & (real_BT.cumsum(1) == 1)], inputs.get("position_ids")
        return cls(
            inputs.get("attention_mask") is not None,
            given is not None,
            begins_BT is not None and bool(begins_BT[:, 1:].any()),
            bool((~real_BT & started & behind).any()),
            bool((~started & behind).any()),
            bool((read_BT & ~started).any()),
            bool((read_BT & ~real_BT & started).any()),
            given is not None and given.is_floating_point() and bool((given != given.round()).any()),
            follows,
            bool((first == 0).all()),
            int(position_BT.max()),
        )

    @property
    def signature(self) -> tuple[bool, ...]:
        """All facts except the largest position number."""
        return astuple(self)[:-1]


@dataclass(frozen=True)
class NeededRows:
    """The positions of a batch that packing computes, and the properties on which their rows depend; all (B, T)."""

    needed_BT: Bools
    token_BT: Ints | None  # None: no example shares rows with another
    position_BT: Ints
    place_BT: Ints  # the place of each position for masks
    real_BT: Bools
    read_BT: Bools  # positions whose output is read
    alone_BT: Bools  # padding that is trained
    begins_BT: Bools | None  # positions where another sequence begins inside an example; None: nowhere
    facts: BatchFacts
    balances: bool  # whether the loss balances experts over all positions that are not padding
    states: bool  # whether the forward returns the hidden states of all these positions

    @cached_property
    def sources(self) -> list[Ints]:
        """For each example the indices of its computed positions among all B * T."""
        flat_BT = np.arange(self.needed_BT.size).reshape(self.needed_BT.shape)
        return [flat[row] for flat, row in zip(flat_BT, self.needed_BT, strict=True)]

    @property
    def keys(self) -> list[Ints]:
        """For each example the values that determine the hidden states of its computed positions."""
        assert self.token_BT is not None
        numbers = [values.reshape(-1) for values in (self.token_BT, self.position_BT, self.place_BT)]
        return [np.stack([values[source] for values in numbers], 1) for source in self.sources]

    @property
    def reads(self) -> list[Bools]:
        """For each example whether each of its computed positions is read."""
        return [self.read_BT.reshape(-1)[source] for source in self.sources]


@dataclass(frozen=True)
class PackedBatch:
    """The computed rows of one batch."""

    layout: PackedLayout
    read_BT: Tensor  # positions whose output the caller reads
    place_R: Tensor  # indices of these positions among the B * T; computed on the host, so that it need not wait
    read_on_host_BT: Bools  # the same as read_BT
    padding: int = 0  # skipped padding
    unread: int = 0  # skipped positions after the last label of their example
    weightless: int = field(default=0, kw_only=True)  # outputs that are not read because their loss has weight zero
    facts: BatchFacts | None = field(default=None, kw_only=True)  # None for an encoder-decoder
    count_N: Tensor | None = field(default=None, kw_only=True)  # positions of each row, if a loss balances experts
    number: int | None = field(default=None, kw_only=True)  # number of the micro-batch in its update's plan

    @cached_property
    def head_rows(self) -> tuple[Ints, Ints]:
        """The rows of the head, ascending, (U,), and for each position that is read the number of its row among them,
        (R,); on the host."""
        index_U, inverse_R = np.unique(self.layout.host.row_BT[self.read_on_host_BT], return_inverse=True)
        return index_U, inverse_R

    @property
    def num_positions(self) -> int:
        """Positions of the plain batch."""
        return self.read_BT.numel()

    @property
    def num_shared(self) -> int:
        """Positions that use the row of another example."""
        return self.layout.num_shared

    @property
    def signature(self) -> tuple[bool, ...]:
        """The kinds of rows that packing skipped."""
        layout = self.layout
        kinds = (bool(layout.num_shared), not layout.host.computed_BT.all(), len(layout.groups) > 1, layout.is_causal)
        if self.facts is None:
            return kinds
        told = (bool(self.weightless), self.count_N is not None, self.number is not None)
        return (*kinds, *self.facts.signature, *told)


@dataclass
class Counts:
    """Positions of all batches so far."""

    batches: int = 0
    packed: int = 0  # batches in which rows were skipped
    positions: int = 0
    padding: int = 0
    unread: int = 0  # after the last label of an example
    shared: int = 0
    outputs: int = 0  # rows of the head in plain forwards
    head: int = 0  # rows that the head skipped
    weightless: int = 0  # outputs whose loss has weight zero
    late: int = 0  # computed rows that the last layer skipped
    error: float = 0.0  # largest relative error that verification found
    checks: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # batches that ran plainly, by the reason

    compared: str = "gradient"  # the compared quantity, for the report
    plain_is_wrong: str = ""  # why the plain step is wrong, as examples influence each other; empty: no such finding

    def refuse(self, reason: str) -> None:
        """Count a batch in which no row can be skipped."""
        self.refused[reason] += 1

    def add_plain(self, num_positions: int, num_outputs: int | None = None) -> None:
        """Count a batch that ran plainly. ``num_outputs``: rows of the head, None for as many as positions."""
        self.batches += 1
        self.outputs += num_positions if num_outputs is None else num_outputs
        self.positions += num_positions

    def add(self, batch: PackedBatch, head_rows: int, last_rows: int | None) -> None:
        """Count a packed batch, with the rows that the head (0: no head) and the last layer (None: all rows) ran."""
        self.add_plain(batch.num_positions, batch.read_BT.numel())
        self.packed += 1
        self.padding += batch.padding
        self.unread += batch.unread
        self.shared += batch.num_shared
        self.weightless += batch.weightless
        self.late += 0 if last_rows is None else batch.layout.num_rows - last_rows
        self.head += batch.read_BT.numel() - head_rows if head_rows else 0

    def describe(self) -> str:
        """Return a sentence for the report."""
        refused = "".join(f"; {count} batches ran without lossless: {reason}" for reason, count in self.refused.items())
        if not self.packed:
            return f"nothing to skip in {self.batches} batches{refused}"
        share = (self.padding + self.unread + self.shared) / self.positions
        late = f" and {self.late / self.positions:.0%} of the last layer's rows" if self.late else ""
        text = (
            f"skipped {share:.0%} of the positions ({self.padding:,} padding, {self.unread:,} after the last "
            f"label, {self.shared:,} in a shared prefix) and {self.head / self.outputs:.0%} of the head's rows"
            f"{late}, in {self.packed} of {self.batches} batches"
        )
        if self.weightless:
            text += f"; {self.weightless:,} outputs of weight 0 skipped"
        if self.checks:
            plain = "one" if self.compared == "gradient" else "ones"
            text += (
                f"; {self.compared} compared with the ordinary {plain} in {self.checks} of these batches, largest "
                f"relative error {self.error:.1e}"
            )
        return text + refused + (f"; {self.plain_is_wrong}" if self.plain_is_wrong else "")


def to_place(read_BT: Bools, device: torch.device) -> tuple[Tensor, Tensor, Bools]:
    """Return the positions that are read, the index of each, and the positions on the host."""
    return torch.from_numpy(read_BT).to(device), to_tensor(np.flatnonzero(read_BT), device), read_BT


def to_host(inputs: Mapping[str, Any], size: tuple[int, int]) -> Mapping[str, Any]:
    """Return inputs whose ids, mask and position numbers are on the host, by one copy: the host waits once."""
    names = [name for name in ("input_ids", "attention_mask", "position_ids") if _is_elsewhere(inputs.get(name), size)]
    if not names:
        return inputs
    return {**inputs, **dict(zip(names, torch.stack([inputs[name].long() for name in names]).cpu(), strict=True))}


def _is_elsewhere(value: object, size: tuple[int, int]) -> bool:
    """Return whether a value is a tensor of integers (B, T) on a device."""
    return (
        isinstance(value, Tensor)
        and value.device.type != "cpu"
        and value.shape == size
        and not value.is_floating_point()
    )


def read_mask(inputs: Mapping[str, Any], size: tuple[int, int]) -> Bools | None:
    """Return which positions are not padding; None for a mask of other dimensions, whose meaning is unknown."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return np.ones(size, bool)
    real: Bools = mask.cpu().numpy().astype(bool)
    return real if real.shape == size else None


def has_weights(inputs: Mapping[str, Any]) -> bool:
    """Return whether a mask has values other than 0 and 1."""
    mask = inputs.get("attention_mask")
    return mask is not None and bool(((mask != 0) & (mask != 1)).any())


def read_positions(stack: nn.Module, inputs: Mapping[str, Any], size: tuple[int, int]) -> Ints | None:
    """Return the position numbers that the model assigns; None if unknown."""
    given = inputs.get("position_ids")
    if given is not None:
        if given.dim() != 2 or given.shape[1] != size[1]:
            return None
        positions: Ints = given.expand(size).cpu().numpy().astype(np.int64)
        return positions
    for owner, module in [(parent, child) for parent in stack.modules() for child in parent.children()]:
        # RoBERTa and its family do not count the padding token.
        make = getattr(module, "create_position_ids_from_input_ids", None)
        if make is not None:
            ids = inputs.get("input_ids")
            if ids is None:
                return None
            counted: Ints = make(ids, getattr(module, "padding_idx", None)).cpu().numpy()
            return counted
        # OPT and its family do not count positions that the mask covers.
        mask = inputs.get("attention_mask")
        counts = isinstance(module, nn.Embedding) and "attention_mask" in argument_names(module)
        if counts and mask is not None and "arange" not in inspect.unwrap(type(owner).forward).__code__.co_names:
            covered: Ints = (mask.long().cumsum(1) * mask - 1).long().cpu().numpy()
            return covered
    return np.broadcast_to(np.arange(size[1]), size).copy()


def renew(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fresh inputs for one of several passes: a model may change them in place, as CTRL scales inputs_embeds."""
    return {n: v.clone() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()}


def find_before(real_BT: Bools) -> Bools:
    """Return the padding directly before the first real position of each example."""
    started_BT, before_BT = real_BT.cumsum(1) > 0, np.zeros(real_BT.shape, bool)
    before_BT[:, :-1] = started_BT[:, 1:] & ~started_BT[:, :-1]
    return before_BT


def find_places(real_BT: Bools, position_BT: Ints, begins_BT: Bools | None) -> Ints:
    """Return the places that masks use, like transformers: columns counted from the first real one. Examples with
    several sequences use position numbers, which follow the columns within each sequence.
    """
    if begins_BT is not None:
        return position_BT
    first_B = np.where(real_BT.any(1), real_BT.argmax(1), 0)
    places: Ints = np.arange(real_BT.shape[1]) - first_B[:, None]
    return places


def find_targets(given: Mapping[str, Any], labels_BT: Tensor | None = None) -> Tensor | None:
    """Return the label (B, T) that each position predicts; None if neither the forward nor the script (``labels_BT``)
    has labels."""
    own_BT, shifted = given.get("labels"), given.get(SHIFTED)
    if own_BT is not None and shifted is not None:
        return cast("Tensor", shifted).reshape(own_BT.shape)
    labels_BT = labels_BT if own_BT is None else own_BT
    return None if labels_BT is None else nn.functional.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:]


def has_cut_labels(given: Mapping[str, Any]) -> bool:
    """Return whether the labels belong only to the positions that ``logits_to_keep`` names."""
    first, labels = next(given[name] for name in BATCH if name in given), given.get("labels")
    return labels is not None and labels.shape != first.shape[:2]


def find_predicting(target_BT: Tensor) -> Bools:
    """Return the positions (B, T) that predict a label."""
    read: Bools = (target_BT != IGNORED).cpu().numpy()
    return read


def find_labelled(batch: Mapping[str, Any]) -> Bools | None:
    """Return the positions (B, T) of a coming batch whose output is read; None: all positions but padding."""
    target_BT, weight_BT, weight_B = find_targets(batch), batch.get(LOSS_WEIGHT), batch.get("example_weight")
    read = None if target_BT is None else find_predicting(target_BT)
    if read is not None and weight_BT is not None:
        read[:, :-1] &= (weight_BT[:, 1:] != 0).cpu().numpy()
    if read is not None and weight_B is not None:
        read &= (weight_B.reshape(len(read), -1) != 0).any(1).cpu().numpy()[:, None]
    return read
