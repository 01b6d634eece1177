"""Which rows are computed: equal positions have one row, and each row attends to what it attends to in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp_cli.backward.kind.packing import layout as layout_module
from sparsebp_cli.backward.kind.packing.layout import PackedLayout, make_layout

CPU = torch.device("cpu")


def _rows_attended(layout: PackedLayout) -> dict[int, list[int]]:
    """Return for each row the rows that it attends to, in order, causally."""
    found = {}
    for group in layout.groups:
        size = group.num_segments * group.length
        places = list(range(size)) if group.padding is None else group.padding.place_R.tolist()
        for row, place in enumerate(places, start=group.start):
            segment, number = divmod(place, group.length)
            before = group.ancestor_GA[segment].tolist()
            found[row] = [*before, *range(row - number, row + 1)] if group.attends else []
    return found


@given(st.data())
@pytest.mark.parametrize("smallest", [1, 3])
def test_each_position_has_the_row_of_its_prefix_and_attends_to_it(smallest: int, data: st.DataObject) -> None:
    num_examples, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    ids = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=num_examples * length, max_size=num_examples * length))
    )
    ids = ids.reshape(num_examples, length)
    ends = np.array(data.draw(st.lists(st.integers(1, length), min_size=num_examples, max_size=num_examples)))
    needed = np.arange(length) < ends[:, None]
    position = np.broadcast_to(np.arange(length), ids.shape).copy()
    before, layout_module.MIN_SHARED = layout_module.MIN_SHARED, smallest
    try:
        layout = make_layout(needed, ids, position, CPU, is_causal=True)
    finally:
        layout_module.MIN_SHARED = before
    row, source = layout.row_BT.numpy(), layout.source_N.numpy()
    assert (layout.computed_BT.numpy() == needed).all()
    attended = _rows_attended(layout)
    for b, t in np.argwhere(needed):
        assert (ids.reshape(-1)[source[row[b, t]]], layout.position_N[row[b, t]]) == (ids[b, t], t)
        assert attended[int(row[b, t])] == row[b, : t + 1].tolist()
    prefixes = {tuple(ids[b, : t + 1]) for b, t in np.argwhere(needed)}
    assert layout.num_rows >= len(prefixes)
    if smallest == 1:
        assert layout.num_rows == len(prefixes)
    assert layout.num_shared == needed.sum() - layout.num_rows


def test_without_sharing_every_needed_position_has_a_row() -> None:
    needed = np.array([[True, True, False], [False, True, True]])
    layout = make_layout(needed, None, np.zeros((2, 3), np.int64), CPU, is_causal=False)
    assert (layout.num_rows, layout.num_shared, len(layout.groups)) == (4, 0, 1)
    assert sorted(layout.row_BT[torch.from_numpy(needed)].tolist()) == [0, 1, 2, 3]
    spread = layout.spread(torch.arange(1.0, 5.0)[:, None])
    assert (spread[..., 0] == torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]])).all()


def test_several_sequences_of_one_example_attend_to_themselves() -> None:
    position = np.array([[0, 1, 2, 0, 1, 0]])
    begins = np.array([[False, False, False, True, False, True]])
    layout = make_layout(np.ones((1, 6), bool), None, position, CPU, is_causal=True, begins_BT=begins)
    row = layout.row_BT[0].tolist()
    attended = _rows_attended(layout)
    assert attended[row[4]] == [row[3], row[4]]
    assert attended[row[5]] == [row[5]]


def test_padding_that_is_trained_attends_to_nothing() -> None:
    needed, alone = np.array([[False, True, True]]), np.array([[True, False, False]])
    layout = make_layout(needed, None, np.arange(3)[None], CPU, is_causal=True, alone_BT=alone)
    assert layout.num_rows == 3
    assert _rows_attended(layout)[int(layout.row_BT[0, 0])] == []
