"""Selections are what their definition says, entry by entry, and selectors keep what has the largest score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from sparsebp_cli.policies.random import Random
from sparsebp_cli.policies.topk import TopK
from sparsebp_cli.policy import Blocks, Columns, Elements, Groups, Rows, Selection, Site, Split, Step, TwoToFour, Values
from sparsebp_shelf.policies.selective_backprop import SelectiveBackprop

GRAD_NO = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
SITE = Site("linear", 10, (2, 3))
MASK_NO = torch.tensor([True, True, False, False, False, True, True, False, True, True]).expand(6, 10)


def keep_where(factor: Any, grad_NO: Tensor = GRAD_NO) -> Tensor:
    """Return the gradient times a factor of each place, one place after the other."""
    found = torch.zeros_like(grad_NO)
    for row in range(grad_NO.shape[0]):
        for column in range(grad_NO.shape[1]):
            found[row, column] = factor(row, column) * grad_NO[row, column] if factor(row, column) else 0.0
    return found


SELECTIONS: dict[str, tuple[Selection, Any, int]] = {
    "rows": (Rows(torch.tensor([4, 1])), lambda n, o: n in (1, 4), 20),
    "weighted rows": (Rows(torch.tensor([4, 1]), torch.tensor([3.0, 2.0])), lambda n, o: {4: 3, 1: 2}.get(n, 0), 20),
    "columns": (Columns(torch.tensor([9, 0, 3])), lambda n, o: o in (0, 3, 9), 18),
    "weighted columns": (
        Columns(torch.tensor([9, 0]), torch.tensor([3.0, 2.0])), lambda n, o: {9: 3, 0: 2}.get(o, 0), 12,
    ),
    "elements": (Elements(torch.tensor([59, 0, 13])), lambda n, o: 10 * n + o in (0, 13, 59), 3),
    "weighted elements": (Elements(torch.tensor([59, 13]), 2.0), lambda n, o: 2 * (10 * n + o in (13, 59)), 2),
    "blocks": (Blocks(torch.tensor([0, 5]), (4, 4)), lambda n, o: (n // 4, o // 4) in ((0, 0), (1, 2)), 16 + 4),
    "weighted blocks": (
        Blocks(torch.tensor([4, 2]), (4, 4), torch.tensor([3.0, 0.5])),
        lambda n, o: {(1, 1): 3, (0, 2): 0.5}.get((n // 4, o // 4), 0), 8 + 8,
    ),
    "two to four": (TwoToFour(MASK_NO), lambda n, o: bool(MASK_NO[n, o]), 6 * 6),
    "weighted two to four": (TwoToFour(MASK_NO, 2.0), lambda n, o: int(MASK_NO[n, o]) * (2 if o < 8 else 1), 6 * 6),
    "groups side by side": (
        Groups(MASK_NO * 3.0, (1, 4)), lambda n, o: 3 * int(MASK_NO[n, o]), 6 * 3,
    ),
    "groups below each other": (
        Groups(MASK_NO * 1.0, (2, 4), along_rows=True), lambda n, o: bool(MASK_NO[n, o]), 10 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_is_the_dense_gradient_times_the_factor_of_each_place(name: str, dtype: torch.dtype) -> None:
    selection, factor, count = SELECTIONS[name]
    grad_NO = GRAD_NO.to(dtype, copy=True)
    grad_NO[torch.tensor([[not factor(n, o) for o in range(10)] for n in range(6)])] = torch.inf  # what is cut
    before = grad_NO.clone()
    found = selection.apply(grad_NO)
    assert torch.equal(found, keep_where(factor, grad_NO))
    assert torch.equal(grad_NO, before)
    assert found.dtype == dtype
    assert int(selection.num_kept(grad_NO)) == count


def test_a_fine_weight_of_a_block_is_not_rounded_before_the_gradient_is() -> None:
    weight = 1 + 2.0**-40
    found = Blocks(torch.tensor([0]), (6, 10), torch.tensor([weight], dtype=torch.float64)).apply(GRAD_NO.double())
    assert torch.equal(found, GRAD_NO.double() * weight)


def test_values_are_a_copy_in_the_type_of_the_gradient() -> None:
    values = GRAD_NO.round()
    found = Values(values).apply(GRAD_NO)
    assert torch.equal(found, values)
    assert found.data_ptr() != values.data_ptr()
    assert Values(values).apply(GRAD_NO.double()).dtype == torch.float64
    assert int(Values(values).num_kept(GRAD_NO)) == int((values != 0).sum())


def test_a_split_keeps_the_mean_of_both() -> None:
    assert Split(None, Rows(torch.tensor([0]))).num_kept(GRAD_NO) == (60 + 10) / 2
    assert Split(Columns(torch.tensor([0])), Rows(torch.tensor([0]))).num_kept(GRAD_NO) == (6 + 10) / 2


def top(score: Tensor, count: int) -> set[int]:
    return {*score.flatten().topk(count).indices.tolist()}


def chosen(selection: Selection | None) -> set[int]:
    assert isinstance(selection, Rows | Columns | Blocks | Elements)
    return {*selection.index_K.tolist()}


SPREAD = torch.tensor([1.0, 5.0, 1.0, 3.0, 1.0, 2.0])[:, None] * (1 + GRAD_NO.abs())
STEP = Step(3)


@pytest.mark.parametrize("by", ["l1", "l2"])
def test_rows_columns_and_blocks_of_largest_norm_are_kept(by: Any) -> None:
    order = int(by[1])
    # Of one large entry the 2-norm is the larger one, of equal ones the sum.
    grad_NO = torch.full((6, 10), 0.1)
    grad_NO[2, 3], grad_NO[4] = 2.0, 0.5
    grad_NO += GRAD_NO / 1000
    assert chosen(TopK(keep=0.17, by=by).select(grad_NO, SITE, STEP)) == top(grad_NO.norm(order, dim=1), 1)
    columns = TopK(keep=0.3, along="columns", by=by).select(GRAD_NO, SITE, STEP)
    assert chosen(columns) == top(GRAD_NO.norm(order, dim=0), 3)
    blocks = TopK(keep=0.5, along="blocks", block=(4, 4), by=by).select(GRAD_NO, SITE, STEP)
    sizes = [GRAD_NO[n : n + 4, o : o + 4].norm(order) for n in (0, 4) for o in (0, 4, 8)]
    assert chosen(blocks) == top(torch.stack(sizes), 3)


def test_the_share_is_taken_in_the_batch_in_each_example_or_in_each_row() -> None:
    def keep(along: Any, within: Any) -> set[int]:
        return chosen(TopK(keep=1 / 3, along=along, within=within).select(SPREAD, SITE, STEP))

    size = SPREAD.norm(dim=1)
    assert keep("rows", "batch") == top(size, 2)
    assert keep("rows", "example") == {int(size[:3].argmax()), 3 + int(size[3:].argmax())}
    assert keep("elements", "batch") == top(SPREAD, 20)
    assert keep("elements", "example") == top(SPREAD[:3], 10) | {30 + n for n in top(SPREAD[3:], 10)}
    assert keep("elements", "row") == {10 * row + n for row in range(6) for n in top(SPREAD[row], 3)}


def test_two_of_every_four_neighbours_are_kept() -> None:
    selection = TopK(keep=0.5, along="2:4").select(GRAD_NO, SITE, STEP)
    assert isinstance(selection, TwoToFour)
    for row in range(6):
        for begin in (0, 4):
            wanted = top(GRAD_NO[row, begin : begin + 4].abs(), 2)
            assert {*selection.mask_NO[row, begin : begin + 4].nonzero().flatten().tolist()} == wanted
    assert selection.mask_NO[:, 8:].all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"along": "columns", "within": "example"}, "allowed: batch$|allowed: batch "),
        ({"along": "rows", "within": "row"}, "allowed: batch, example"),
        ({"along": "2:4", "keep": 0.25}, "with 'along: 2:4', keep must be 0.5"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TopK(**{"keep": 0.5, **options})


def test_what_goes_together_is_accepted_and_a_share_of_1_is_dense() -> None:
    for along, within in [("rows", "example"), ("elements", "row"), ("elements", "example"), ("columns", "batch")]:
        TopK(keep=0.25, along=along, within=within)
    assert TopK(keep=1.0, along="2:4").exact
    for kind in (TopK, Random):
        dense, half = kind(keep=1.0), kind(keep=0.5, along="columns")
        assert dense.select(GRAD_NO, SITE, STEP) is None
        assert (dense.exact, dense.unbiased, dense.selection, dense.budget) == (True, True, None, 1.0)
        assert (half.exact, half.unbiased, half.selection, half.budget) == (False, False, Columns, 0.5)
    assert Random(keep=0.5, weighted=True).unbiased


def test_the_control_of_topk_is_random_with_the_same_options() -> None:
    assert TopK(keep=1.0).control is None
    control = TopK(keep=0.5, along="blocks", block=(2, 3), by="l1").control
    assert control is not None
    assert {key: control[key] for key in ("name", "keep", "along", "block")} == {
        "name": "random", "keep": 0.5, "along": "blocks", "block": [2, 3],
    }  # fmt: skip
    assert "by" not in control


@pytest.mark.parametrize(
    ("along", "number", "kept"), [("rows", 6, 2), ("columns", 10, 3), ("blocks", 6, 2), ("elements", 60, 20)]
)
def test_random_parts_are_drawn_by_the_step_and_weighted_by_their_share(along: Any, number: int, kept: int) -> None:
    def draw(index: int, *, weighted: bool = False) -> Any:
        return Random(keep=1 / 3, along=along, block=(4, 4), weighted=weighted).select(GRAD_NO, SITE, Step(index))

    draws = [tuple(draw(index).index_K.tolist()) for index in range(40)]
    assert {len({*one}) for one in draws} == {kept}
    assert {part for one in draws for part in one} == set(range(number))
    assert draws == [tuple(draw(index).index_K.tolist()) for index in range(40)]
    assert len({*draws}) > 5
    weighted = draw(0, weighted=True)
    if along == "elements":
        assert (draw(0).weight, weighted.weight) == (1.0, number / kept)
    else:
        assert draw(0).weight_K is None
        assert torch.equal(weighted.weight_K, torch.full((kept,), number / kept))
        double = Random(keep=1 / 3, along=along, block=(4, 4), weighted=True).select(GRAD_NO.double(), SITE, STEP)
        assert double.weight_K.dtype == torch.float64  # type: ignore[union-attr]


def test_weighted_random_pairs_of_four_count_twice() -> None:
    for weighted, weight in ((False, 1.0), (True, 2.0)):
        selection = Random(keep=0.5, along="2:4", weighted=weighted).select(GRAD_NO, SITE, STEP)
        assert isinstance(selection, TwoToFour)
        assert selection.weight == weight


def test_examples_are_selected_between_two_points_but_at_interruptions() -> None:
    def chosen_at(num_steps: int | None, **options: Any) -> list[int]:
        policy = SelectiveBackprop(**{"keep": 0.5, "start": 0.25, "end": 0.75, "interrupt": 0, **options})
        return [step for step in range(12) if policy.is_choosing(Step(step, num_steps=num_steps))]

    assert chosen_at(12) == [3, 4, 5, 6, 7, 8]
    assert chosen_at(12, interrupt=3) == [3, 4, 6, 7]
    assert chosen_at(12, start=0.0, interrupt=2) == [0, 2, 4, 6, 8]
    assert chosen_at(None, start=0.0, end=1.0) == list(range(12))
    assert chosen_at(12, keep=1.0) == chosen_at(12, interrupt=1) == []


def test_selecting_examples_depends_on_the_number_of_steps_unless_always_or_never() -> None:
    def needs(**options: Any) -> bool:
        return SelectiveBackprop(**{"keep": 0.5, "start": 0.0, "end": 1.0, **options}).needs_num_steps

    assert [needs(), needs(start=0.1), needs(end=0.9), needs(start=0.1, keep=1.0), needs(end=0.9, interrupt=1)] == [
        False, True, True, False, False,
    ]  # fmt: skip
    with pytest.raises(ValidationError, match=r"start must be below end, got start 0.5 and end 0.5"):
        SelectiveBackprop(keep=0.5, start=0.5, end=0.5)
    assert SelectiveBackprop(keep=1.0).control is None
    control = SelectiveBackprop(keep=0.5, start=0.25).control
    assert control is not None
    assert (control["name"], control["keep"], control["start"]) == ("uniform", 0.5, 0.25)
