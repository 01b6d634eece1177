"""Water-filled probabilities, and draws of fixed size with these."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, pairwise, permutations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebp_shelf import sampling

DRAWS = 10_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Computed by the published code of VCAS (arXiv 2402.17227, thu-ml/VCAS at 0bc7d08); thirds by hand.
@pytest.mark.parametrize(
    ("score", "num_kept", "expected"),
    [
        ((1, 2, 3, 4, 10), 1, (0.05, 0.1, 0.15, 0.2, 0.5)),
        ((1, 2, 3, 4, 10), 2, (0.1, 0.2, 0.3, 0.4, 1)),
        ((1, 2, 3, 4, 10), 3, (0.2, 0.4, 0.6, 0.8, 1)),
        ((1, 2, 3, 4, 10), 4, (1 / 3, 2 / 3, 1, 1, 1)),
        ((1, 2, 3, 4, 10), 5, (1, 1, 1, 1, 1)),
        ((0, 0, 1, 1), 2, (0, 0, 1, 1)),
        ((0, 0, 1, 1), 3, (0.5, 0.5, 1, 1)),
        ((0, 0, 0), 1, (1 / 3, 1 / 3, 1 / 3)),
        ((7,), 1, (1,)),
    ],
)
def test_probabilities_are_those_of_the_published_code(
    score: tuple[float, ...], num_kept: int, expected: tuple[float, ...]
) -> None:
    probability = sampling.water_fill(torch.tensor(score, dtype=torch.float32), num_kept)
    assert probability.tolist() == pytest.approx(expected, abs=1e-9)


def fill_slowly(score: list[Fraction], num_kept: int) -> list[Fraction]:
    """Return the definition: what would exceed 1 becomes certain, and the rest is shared again."""
    certain: set[int] = set()
    while True:
        rest = sum(value for i, value in enumerate(score) if i not in certain)
        share = [
            value * (num_kept - len(certain)) / rest if i not in certain else Fraction(1)
            for i, value in enumerate(score)
        ]
        above = {i for i, value in enumerate(share) if value > 1}
        if not above:
            return share
        certain |= above


@pytest.mark.parametrize("seed", range(20))
def test_probabilities_equal_the_definition_in_fractions(seed: int) -> None:
    whole = torch.randint(1, 50, (9,), generator=generator(seed)).pow(2)
    for num_kept in range(1, 9):
        expected = fill_slowly([Fraction(int(value)) for value in whole], num_kept)
        probability = sampling.water_fill(whole, num_kept)
        assert probability.tolist() == pytest.approx([float(value) for value in expected], abs=1e-9)
        assert float(probability.sum()) == pytest.approx(num_kept, abs=1e-9)


def test_scores_that_are_no_numbers_still_give_probabilities() -> None:
    score = torch.tensor([float("nan"), float("inf"), 1.0, -1.0])
    probability = sampling.water_fill(score, 2)
    assert bool(((probability > 0) & (probability <= 1)).all())
    assert float(probability.sum()) == pytest.approx(2)
    assert probability[:2].tolist() == pytest.approx([1, 1])  # a gradient that is no number shows, as without selection


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_probabilities_do_not_depend_on_the_scale(scale: float, dtype: torch.dtype) -> None:
    score = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=torch.float64)
    probability = sampling.water_fill((score * scale).to(dtype), 2)
    assert probability.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 1], abs=0.01)


def test_a_draw_is_of_exactly_that_many_different_rows() -> None:
    for seed in range(2_000):
        score = torch.rand(37, generator=generator(seed)).pow(8)
        num_kept = 1 + seed % 37
        index = sampling.draw(sampling.water_fill(score, num_kept), num_kept, generator(seed))
        assert index.dtype == torch.int64
        assert index.unique().tolist() == index.tolist()  # in order, none twice
        assert len(index) == num_kept


@pytest.mark.parametrize("off", [-1e-3, 1e-3])
def test_probabilities_that_miss_the_sum_still_draw_different_rows(off: float) -> None:
    probability = torch.full((1000,), 0.5, dtype=torch.float64) + off
    probability[:400] = 1.0
    for seed in range(500):
        index = sampling.draw(probability, 700, generator(seed))
        assert index.unique().numel() == 700


def frequencies(probability: Tensor, num_kept: int) -> Tensor:
    count = torch.zeros_like(probability)
    for seed in range(DRAWS):
        count[sampling.draw(probability, num_kept, generator(seed))] += 1
    return count / DRAWS


@pytest.mark.parametrize(("score", "num_kept"), [((1, 2, 3, 4, 10), 2), ((0.5, 0.2, 0.1, 0.1, 0.05, 0.05), 3)])
def test_rows_are_drawn_as_often_as_their_probability_says(score: tuple[float, ...], num_kept: int) -> None:
    probability = sampling.water_fill(torch.tensor(score), num_kept)
    error = (frequencies(probability, num_kept) - probability).abs()
    bound = 5 * (probability * (1 - probability) / DRAWS).sqrt() + 1e-9
    assert bool((error <= bound).all())


def probability_of_each_subset(probability: list[Fraction], num_kept: int) -> dict[tuple[int, ...], Fraction]:
    """Return the exact law of systematic sampling in random order, over all orders and offsets."""
    law: dict[tuple[int, ...], Fraction] = {}
    orders = list(permutations(range(len(probability))))
    for order in orders:
        ends = [sum((probability[i] for i in order[: n + 1]), Fraction(0)) for n in range(len(order))]
        cuts = sorted({Fraction(0), Fraction(1), *(end % 1 for end in ends)})
        for low, high in pairwise(cuts):
            offset = (low + high) / 2
            hit = tuple(
                sorted(
                    order[next(n for n, end in enumerate(ends) if end > point + offset)] for point in range(num_kept)
                )
            )
            law[hit] = law.get(hit, Fraction(0)) + (high - low) / len(orders)
    return law


def test_the_enumerated_draw_has_the_probabilities_and_an_unbiased_sum() -> None:
    probability = fill_slowly([Fraction(value) for value in (1, 2, 3, 4, 10, 2)], 3)
    law = probability_of_each_subset(probability, 3)
    assert sum(law.values()) == 1
    assert all(len(set(subset)) == 3 for subset in law)
    for row in range(6):
        assert sum(chance for subset, chance in law.items() if row in subset) == probability[row]
    term = [Fraction(value) for value in (5, -3, 2, 7, 11, 1)]
    mean = sum(chance * sum(term[i] / probability[i] for i in subset) for subset, chance in law.items())
    assert mean == sum(term)
    # The code draws from this law: every subset as often as its probability says.
    tensor = torch.tensor([float(value) for value in probability], dtype=torch.float64)
    counts = dict.fromkeys(combinations(range(6), 3), 0)
    for seed in range(DRAWS):
        counts[tuple(sampling.draw(tensor, 3, generator(seed)).tolist())] += 1
    for subset, count in counts.items():
        chance = float(law.get(subset, Fraction(0)))
        assert abs(count / DRAWS - chance) <= 5 * (chance * (1 - chance) / DRAWS) ** 0.5 + 1e-9


def outer(seed: int) -> tuple[Tensor, Tensor]:
    """Return 64 rows of an input and of a gradient with very different norms."""
    one = generator(seed)
    x = torch.randn(64, 8, dtype=torch.float64, generator=one) * torch.rand(64, 1, generator=one).double().exp()
    spread = (torch.rand(64, 1, generator=one).double() * 3).exp()
    return x, torch.randn(64, 5, dtype=torch.float64, generator=one) * spread


def mean_squared_error(x: Tensor, grad: Tensor, probability: Tensor, num_kept: int | None) -> float:
    total, whole = 0.0, grad.t() @ x
    for seed in range(DRAWS):
        if num_kept is None:
            index = sampling.draw_independently(probability, generator(seed))
        else:
            index = sampling.draw(probability, num_kept, generator(seed))
        weight = 1 / probability[index]
        total += float(((grad[index] * weight[:, None]).t() @ x[index] - whole).square().sum())
    return total / DRAWS


def test_the_variance_of_independent_draws_is_its_formula_within_5_percent() -> None:
    x, grad = outer(0)
    size = x.norm(dim=1) * grad.norm(dim=1)
    probability = sampling.water_fill(size, 16)
    formula = float(sampling.variance(size, probability))
    assert mean_squared_error(x, grad, probability, None) == pytest.approx(formula, rel=0.05)


def test_a_draw_of_fixed_size_varies_as_independent_ones_within_5_percent() -> None:
    x, grad = outer(0)
    size = x.norm(dim=1) * grad.norm(dim=1)
    probability = sampling.water_fill(size, 16)
    formula = float(sampling.variance(size, probability))
    assert mean_squared_error(x, grad, probability, 16) == pytest.approx(formula, rel=0.05)


def test_the_variance_of_bernoulli_crs_is_the_published_number() -> None:
    # arXiv 1805.08079, bernoulli-CRS with k = 2: A = [[1,2,3],[4,5,6]], B = [[1,0],[0,2],[3,1]].
    left = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).norm(dim=0)
    right = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]]).norm(dim=1)
    probability = sampling.water_fill(left * right, 2)
    assert probability.tolist() == pytest.approx([0.27684, 0.72316, 1.0], abs=1e-5)
    assert float(sampling.variance(left * right, probability)) == pytest.approx(88.8144, abs=1e-3)


def test_weights_are_the_inverse_of_the_probabilities() -> None:
    weight = sampling.weigh(torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64), torch.tensor([1, 2]))
    assert weight.tolist() == [4.0, 1.0]
    assert weight.dtype == torch.float32


@pytest.mark.parametrize("num_kept", [0, 4])
def test_a_count_that_cannot_be_drawn_is_refused(num_kept: int) -> None:
    with pytest.raises(ValueError, match=rf"num_kept must be in \[1, 3\], got {num_kept}"):
        sampling.water_fill(torch.ones(3), num_kept)
    with pytest.raises(ValueError, match=r"value_N must have one dimension, got the shape \(2, 2\)"):
        sampling.draw(torch.ones(2, 2), 1, generator())


class NoWaiting(TorchDispatchMode):
    """Fail at what a GPU would make the host wait for."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = str(func)
        assert not any(waiting in name for waiting in ("_local_scalar_dense", "nonzero")), name
        return func(*args, **(kwargs or {}))


def test_neither_probabilities_nor_draws_wait_for_the_device() -> None:
    score = torch.rand(50)
    with NoWaiting():
        probability = sampling.water_fill(score, 10)
        sampling.weigh(probability, sampling.draw(probability, 10, generator()))
