"""N of every M neighbours, unbiased with the least variance: the paper's numbers, enumeration, patterns, training."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Groups, Seen, Site, Split, Step
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf import sampling
from sparsebp_shelf.policies.group_sampling import draw_groups, fill_groups
from sparsebp_shelf.policies.mvue import MVUE

DRAWS = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choose(policy: MVUE, grad: Tensor, draw: int = 0) -> Split:
    split = policy.choose(Seen(grad), Site("layer", grad.shape[1], (len(grad),)), Step(0, draw=draw))
    assert split is not None
    return split


@pytest.mark.parametrize(
    ("group", "kept", "probability", "variance"),
    [
        ((1.0, 2.0, 3.0, 4.0), 2, (0.2, 0.4, 0.6, 0.8), 20.0),
        ((0.1, 0.2, 0.3, 4.0), 2, (1 / 6, 1 / 3, 1 / 2, 1.0), 0.22),
        ((1.0, 3.0), 1, (0.25, 0.75), 6.0),
        ((0.0, 0.0, 1.0, 1.0), 2, (0.0, 0.0, 1.0, 1.0), 0.0),
    ],
)
def test_probabilities_and_variance_are_those_of_the_paper(group, kept, probability, variance) -> None:
    value = torch.tensor(group, dtype=torch.float64)
    found = fill_groups(value[None], kept)[0]
    torch.testing.assert_close(found, torch.tensor(probability, dtype=torch.float64), atol=1e-10, rtol=1e-10)
    assert float(sampling.variance(value, found)) == pytest.approx(variance, abs=1e-9)


def test_groups_of_rows_are_filled_as_one_group_is() -> None:
    score = torch.rand(50, 6, generator=generator()) ** 4
    score[3, 2] = torch.nan
    for kept in range(1, 7):
        alone = torch.stack([sampling.water_fill(row, kept) for row in score])
        torch.testing.assert_close(fill_groups(score, kept), alone, atol=1e-9, rtol=1e-9)


def test_where_no_entry_is_certain_every_kept_value_is_half_the_sum() -> None:
    grad = torch.tensor([[1.0, -2.0, 3.0, -4.0]]).repeat(64, 1)
    split = choose(MVUE(products="dgrad"), grad)
    assert split.dgrad is not None
    kept = split.dgrad.apply(grad)
    assert set(kept.abs().flatten().tolist()) == {0.0, 5.0}
    assert bool((kept.count_nonzero(1) == 2).all())


@pytest.mark.parametrize(("kept", "size"), [(1, 2), (2, 4), (3, 5), (4, 8)])
def test_draws_have_the_given_probabilities_and_size(kept, size) -> None:
    probability = fill_groups(torch.rand(1, size, generator=generator(3)) ** 3, kept)
    drawn = draw_groups(probability.expand(DRAWS, size), kept, generator())
    assert bool((drawn.sum(1) == kept).all())
    error = (drawn.double().mean(0) - probability[0]).abs()
    assert bool((error <= 4 * (probability[0] * (1 - probability[0]) / DRAWS).sqrt() + 1e-9).all())


@pytest.mark.parametrize("group", [(1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 4.0), (5.0, 5.0, 1.0, 0.0)])
def test_the_mean_of_a_draw_is_the_group_and_its_variance_the_formula(group) -> None:
    """The published torch form has the mean (0.38, 0.77, 1.15, 2.30) for the second group."""
    value = torch.tensor(group)
    grad = value[None].repeat(DRAWS, 1)
    split = choose(MVUE(products="dgrad"), grad)
    assert split.dgrad is not None
    kept = split.dgrad.apply(grad).double()
    formula = float(sampling.variance(value.double(), fill_groups(value[None], 2)[0]))
    assert bool(((kept.mean(0) - value).abs() <= 4 * kept.std(0) / DRAWS**0.5 + 1e-9).all())
    assert float(kept.var(0).sum()) == pytest.approx(formula, rel=0.05)


def test_the_mean_over_every_offset_and_order_of_one_group_is_the_group() -> None:
    """By enumeration: of all orders and a fine grid of offsets, what a systematic draw takes."""
    value, kept = (0.5, 1.0, 2.0, 4.5), 2
    probability = [float(p) for p in fill_groups(torch.tensor([value]), kept)[0]]
    mean, number, offsets = [0.0] * 4, 0, 400
    for order in itertools.permutations(range(4)):
        ends = list(itertools.accumulate(probability[place] for place in order))
        for offset in range(offsets):
            points = [(offset + 0.5) / offsets + k for k in range(kept)]
            for at, place in enumerate(order):
                start = ends[at] - probability[place]
                if any(start <= point < ends[at] for point in points):
                    mean[place] += value[place] / probability[place]
            number += 1
    assert [total / number for total in mean] == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("shape", [(8, 12), (9, 7), (3, 2)])
def test_groups_of_wgrad_lie_along_rows_and_of_dgrad_along_features(shape) -> None:
    grad = torch.randn(shape, generator=generator())
    split = choose(MVUE(products="both"), grad)
    for part, length in ((split.wgrad, shape[0]), (split.dgrad, shape[1])):
        assert isinstance(part, Groups)
        kept = part.apply(grad)
        kept = kept.t() if part.along_rows else kept
        whole = length // 4 * 4
        assert bool((kept[:, :whole].reshape(-1, 4).count_nonzero(1) == 2).all()) or whole == 0
        rest = kept[:, whole:]
        assert bool((rest.count_nonzero(1) == min(2, rest.shape[1])).all())
        assert part.num_kept(grad) == int(kept.count_nonzero())
    assert split.wgrad is not None
    assert isinstance(split.wgrad, Groups)
    assert split.wgrad.along_rows


def test_all_of_a_group_trains_as_dense_bit_for_bit() -> None:
    assert equal(train_network(MVUE(kept=4)), train_network(None))


def test_more_than_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="kept must be at most the option group, got kept 5 and group 4"):
        MVUE(kept=5)


def test_the_control_keeps_as_many_at_random() -> None:
    control = MVUE(kept=1, group=2).control
    assert control == {
        "name": "mvue", "where": None, "layers": None, "keep_warmup_steps": 0, "error_feedback": False,
        "kept": 1, "group": 2, "products": "wgrad", "by": "random",
    }  # fmt: skip
    grad = torch.tensor([[1.0, 100.0]]).repeat(1000, 1)
    split = choose(MVUE(kept=1, group=2, products="dgrad", by="random"), grad)
    assert split.dgrad is not None
    assert set(split.dgrad.apply(grad).unique().tolist()) == {0.0, 2.0, 200.0}
