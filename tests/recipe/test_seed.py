"""Seeds of a sweep."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.recipe import Recipe, parse_seeds, with_seed
from tests.recipe.conftest import SMALL

Read = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("0-4", [0, 1, 2, 3, 4]),
        ("0,2,5", [0, 2, 5]),
        ("3", [3]),
        ("7, 0-2", [7, 0, 1, 2]),
        ("5-5", [5]),
        ("0-999", list(range(1000))),
        (str(2**63 - 1), [2**63 - 1]),
    ],
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must be numbers and ranges such as 0-4 or 0,2,5, got ''"),
        ("a", "must be numbers and ranges such as 0-4 or 0,2,5, got 'a'"),
        ("1,,2", "must be numbers and ranges such as 0-4 or 0,2,5, got ''"),
        ("-1", "must be numbers and ranges such as 0-4 or 0,2,5, got '-1'"),
        ("1-2-3", "must be numbers and ranges such as 0-4 or 0,2,5, got '1-2-3'"),
        ("1.5", "must be numbers and ranges such as 0-4 or 0,2,5, got '1.5'"),
        ("9" * 50, f"must be numbers and ranges such as 0-4 or 0,2,5, got '{'9' * 50}'"),
        ("٣", "must be numbers and ranges such as 0-4 or 0,2,5, got '٣'"),
        ("4-0", "a range must ascend, got 4-0; did you mean 0-4?"),
        ("0-2,2", "seed 2 is given twice"),
        ("0-1000", "at most 1000 seeds are allowed"),
        ("0-999,1000", "at most 1000 seeds are allowed"),
        ("0-9999999999999", "at most 1000 seeds are allowed"),
        (str(2**63), f"a seed must be in [0, {2**63 - 1}], got {2**63}"),
    ],
)
def test_wrong_seeds_are_one_line(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_seeds(text)
    assert str(caught.value) == f"--seeds {text}: {expected}"


def test_a_recipe_with_another_seed_differs_in_nothing_else(read: Read) -> None:
    recipe = read(SMALL)
    before, after = recipe.model_dump(), with_seed(recipe, 3).model_dump()
    assert after.pop("training") == before.pop("training") | {"seed": 3}
    assert after == before
    assert recipe.training.seed == 0
    with pytest.raises(UsageError, match="got -1"):
        with_seed(recipe, -1)
