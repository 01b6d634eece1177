"""InfoBatch: which examples an epoch leaves out and what the others weigh; and the suite catches broken promises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsebp_cli as sbp
from sparsebp_cli.policy import Epoch, EpochSelector, Step, Visits
from sparsebp_cli.testing import check_policy
from sparsebp_shelf.policies.infobatch import InfoBatch
from tests.infobatch import obvious
from tests.promise import Everything, Nothing

NAN = math.nan
TABLE = (0.1, 0.2, 0.3, 0.4, 2.0, 3.0)  # mean 1: four are well learnt
STEP = Step(3, seed=5, num_steps=100)


def epoch_of(losses: Sequence[float], *, number: int = 1, before: int = 6, in_all: int = 600) -> Epoch:
    return Epoch(number, torch.tensor(losses), before, in_all)


def weights(policy: InfoBatch, epoch: Epoch, step: Step = STEP) -> list[float]:
    """Return the weight of every example, 0 for those that are left out."""
    visits = policy.choose(epoch, step)
    if visits is None:
        return [1.0] * len(epoch.loss_N)
    found = dict(zip(visits.index_K.tolist(), visits.weight_K.tolist(), strict=True))
    return [found.get(row, 0.0) for row in range(len(epoch.loss_N))]


@pytest.fixture
def permutations(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Iterator[tuple[int, ...]]]:
    """Make ``torch.randperm`` return every permutation in turn, while they are looped over. Of fewer numbers it returns
    each equally often."""

    def each(number: int) -> Iterator[tuple[int, ...]]:
        for order in itertools.permutations(range(number)):

            def draw(count: int, order: tuple[int, ...] = order, **_: object) -> Tensor:
                return torch.tensor([place for place in order if place < count])

            monkeypatch.setattr(torch, "randperm", draw)
            yield order

    return each


def test_of_four_well_learnt_examples_two_are_left_out_and_two_weigh_double() -> None:
    drawn = {tuple(weights(InfoBatch(), epoch_of(TABLE), Step(3, draw=draw))) for draw in range(200)}
    pairs = itertools.combinations(range(4), 2)
    assert drawn == {(*(2.0 if row in pair else 0.0 for row in range(4)), 1.0, 1.0) for pair in pairs}


@pytest.mark.parametrize(
    ("keep", "kept", "weight"), [(0.25, 1, 4.0), (0.5, 2, 2.0), (0.75, 3, 4 / 3), (0.01, 1, 4.0), (1.0, 4, 1.0)]
)
def test_a_fixed_number_is_kept_and_weighs_n_over_k(keep: float, kept: int, weight: float) -> None:
    found = weights(InfoBatch(keep=keep), epoch_of(TABLE))
    assert found[4:] == [1.0, 1.0]
    assert [value for value in found[:4] if value] == pytest.approx([weight] * kept)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.7])
def test_the_choice_is_that_of_the_obvious_form(permutations, keep: float) -> None:
    """For every order of the draw, and tables with equal, missing and few losses."""
    tables = [TABLE, (1.0, 1.0, 1.0), (0.5, NAN, 0.25, 4.0, NAN, 0.5), (NAN, NAN), (0.3,), (0.0, 1.0, 1.0, 1.0, 9.0)]
    for table in tables:
        for order in permutations(5):
            expected = obvious(table, keep, lambda well, order=order: [well[i] for i in order if i < len(well)])
            assert weights(InfoBatch(keep=keep), epoch_of(table)) == pytest.approx(expected)


def _num_well(table: Sequence[float]) -> int:
    seen = [loss for loss in table if not math.isnan(loss)]
    return sum(loss < sum(seen) / len(seen) for loss in seen)


@pytest.mark.parametrize("among", ["below_mean", "all"])
@pytest.mark.parametrize("table", [TABLE, (0.1, 0.2, 0.3, 5.0, 6.0, 0.4, 0.5)], ids=["four", "five"])
def test_the_gradient_of_an_epoch_is_that_of_all_examples_in_the_mean_over_all_draws(
    permutations, table: tuple[float, ...], among: Any
) -> None:
    """Every permutation is one draw of the same probability. Of five, two are kept: 1 / (1 - r) would be 2, n / k is
    2.5."""
    gradient_ND = torch.randn(len(table), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, pool = InfoBatch(among=among), _num_well(table) if among == "below_mean" else len(table)
    sums, plain = [], []
    for _ in permutations(pool):
        weight_N = torch.tensor(weights(policy, epoch_of(table)), dtype=torch.float64)
        sums.append(weight_N @ gradient_ND)
        plain.append(weight_N.where(weight_N <= 1.0, torch.tensor(2.0, dtype=torch.float64)) @ gradient_ND)
    dense_D = gradient_ND.sum(0)
    torch.testing.assert_close(torch.stack(sums).mean(0), dense_D, rtol=0, atol=1e-6)
    if among == "below_mean":
        biased = float((torch.stack(plain).mean(0) - dense_D).abs().max())
        assert (biased > 0.1) == (len(table) == 7), "1 / (1 - r) is right for an even number alone"


def test_an_example_that_was_never_trained_on_is_never_left_out() -> None:
    table = (0.1, NAN, 0.2, NAN, 0.3, 0.4, 2.0, 3.0, NAN)
    for among in ("below_mean", "all"):
        for draw in range(100):
            found = weights(InfoBatch(keep=0.25, among=among), epoch_of(table), Step(3, draw=draw))
            assert [found[row] for row in (1, 3, 8)] == [1.0, 1.0, 1.0]
            assert found.count(0.0) == 3
    assert InfoBatch().choose(epoch_of([NAN] * 6), STEP) is None


def test_equal_losses_are_all_kept() -> None:
    assert InfoBatch(keep=0.1).choose(epoch_of([0.7] * 9), STEP) is None


def test_keeping_everything_is_dense_and_says_so() -> None:
    for policy in (InfoBatch(keep=1.0), InfoBatch(end=0.0)):
        assert policy.exact
        assert policy.control is None
        assert policy.choose(epoch_of(TABLE), STEP) is None
    assert not InfoBatch().exact


def test_every_epoch_that_is_not_over_by_the_end_is_whole() -> None:
    """100 visits in all, so that 87.5 of them come first; this epoch makes 4."""
    chosen = {before: weights(InfoBatch(), epoch_of(TABLE, before=before, in_all=100)) for before in range(101)}
    assert all(0.0 in chosen[before] for before in range(84))  # the last one visits number 87
    assert all(chosen[before] == [1.0] * 6 for before in range(84, 101))


def test_the_control_leaves_out_as_many_of_all_examples_at_random() -> None:
    policy = InfoBatch(keep=0.25, end=0.9)
    entry: dict[str, Any] = dict(policy.control or {})
    assert entry == {"name": "infobatch", "keep": 0.25, "end": 0.9, "among": "all"}
    control = sbp.make_policy(entry.pop("name"), **entry)
    assert isinstance(control, InfoBatch)
    assert control.control is None
    left_out = set()
    for draw in range(300):
        found = weights(control, epoch_of(TABLE), Step(3, draw=draw))
        assert found.count(0.0) == 3  # of the four well-learnt ones the policy keeps one
        assert [value for value in found if value] == pytest.approx([2.0] * 3)
        left_out |= {row for row, value in enumerate(found) if not value}
    assert left_out == set(range(6))


def test_the_share_may_follow_a_schedule_and_the_end_may_not() -> None:
    policy = sbp.make_policy("infobatch", keep={"from": 1.0, "to": 0.25})
    assert isinstance(policy, InfoBatch)
    assert not policy.exact
    num_out = [weights(policy.at(Step(index, num_steps=11)), epoch_of(TABLE)).count(0.0) for index in (0, 5, 10)]
    assert num_out == [0, 1, 3]  # of four: 1.0, 0.66 and 0.25 of them are kept
    with pytest.raises(sbp.PolicyError, match="end"):
        sbp.make_policy("infobatch", end={"from": 1.0, "to": 0.25})


@pytest.mark.parametrize("options", [{}, {"keep": 0.1}, {"keep": 1.0}, {"end": 0.3}, {"among": "all"}], ids=str)
def test_every_form_keeps_the_contract(options: dict[str, Any]) -> None:
    check_policy("infobatch", **options)


class _Half(Nothing, EpochSelector):
    """Keeps the contract: random halves of the rows. Each policy below breaks one promise."""

    def rows(self, epoch: Epoch, step: Step) -> Tensor:
        number = len(epoch.loss_N)
        order = torch.randperm(number, generator=step.generator(epoch))
        return order[: (number + 1) // 2].sort().values

    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        index_K = self.rows(epoch, step)
        return Visits(index_K, torch.full((len(index_K),), len(epoch.loss_N) / len(index_K)))


class _Unweighted(_Half):
    unbiased = property(lambda self: True)

    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        index_K = self.rows(epoch, step)
        return Visits(index_K, torch.ones(len(index_K)))


class _Exact(Everything, _Half):
    pass


class _NoRow(_Half):
    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        return Visits(torch.arange(0), torch.ones(0))


class _OutOfRange(_Half):
    def rows(self, epoch: Epoch, step: Step) -> Tensor:
        return torch.tensor([len(epoch.loss_N)])


class _NotInOrder(_Half):
    def rows(self, epoch: Epoch, step: Step) -> Tensor:
        return super().rows(epoch, step).flip(0)


class _NegativeWeight(_Half):
    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        index_K = self.rows(epoch, step)
        return Visits(index_K, -torch.ones(len(index_K)))


class _OneWeight(_Half):
    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        return Visits(self.rows(epoch, step), torch.ones(1, dtype=torch.float64))


class _GlobalGenerator(_Half):
    def rows(self, epoch: Epoch, step: Step) -> Tensor:
        return torch.randint(len(epoch.loss_N), (1,))


class _SameInEveryEpoch(_Half):
    def rows(self, epoch: Epoch, step: Step) -> Tensor:
        generator = torch.Generator().manual_seed(step.draw + 7 * step.seed)
        return torch.randperm(len(epoch.loss_N), generator=generator)[: (len(epoch.loss_N) + 1) // 2].sort().values


class _ChangesLosses(_Half):
    def rows(self, epoch: Epoch, step: Step) -> Tensor:
        epoch.loss_N.zero_()
        return super().rows(epoch, step)


class _OtherNumber(_Half):
    control = property(lambda self: {"name": "infobatch", "among": "all"})


def test_half_keeps_the_contract() -> None:
    check_policy(_Half)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_Unweighted, "declares unbiased, but the mean weight of an example is 0.5"),
        (_Exact, "declares exact, but selects in epoch 0"),
        (_NoRow, "at least one"),
        (_OutOfRange, r"must visit rows in \[0, "),
        (_NotInOrder, "ascending"),
        (_NegativeWeight, "greater than 0"),
        (_OneWeight, "one weight of float32 for each"),
        (_GlobalGenerator, "global random generator"),
        (_SameInEveryEpoch, "draws the same for every epoch"),
        (_ChangesLosses, "changes what it receives"),
        (_OtherNumber, "examples of an epoch, but its control"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_promise_is_caught(policy: type[EpochSelector], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy)
