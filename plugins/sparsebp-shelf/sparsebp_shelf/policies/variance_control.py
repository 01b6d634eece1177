"""Control variance-controlled sampling: a round of trial passes adjusts the fractions that are drawn.

After Ziteng Wang, Jianfei Chen and Jun Zhu (ICLR 2024), https://arxiv.org/abs/2402.17227, for
:mod:`~sparsebp_shelf.policies.vcas`. At fixed intervals trial passes over some micro-batches measure the variance that
both draws add. Fractions fall if it is below a tolerance of the variance between micro-batches, and rise if it is
above. The constants are the published ones.

Shape letters: B examples, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sparsebp_cli.policy import Budget, Observation, Site, choice
from sparsebp_shelf import sampling

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from sparsebp_cli.policy import State

STRENGTH_STEP, SHARE_FACTOR, MOMENTUM = 0.01, 0.95, 0.6  # alpha, beta, and the momentum of the examples' fractions
STRENGTH, EXAMPLES, ROWS = "strength", "examples ", "rows "  # keys of the state; the last two precede a layer or a site


@dataclass(frozen=True)
class Shares:
    """The state of the policy: fractions of examples by layer and of rows by site, 1 if unknown."""

    state: State

    @classmethod
    def full(cls, sites: Sequence[Site]) -> Self:
        """Return the fractions before the first round: all 1."""
        layers = {f"{EXAMPLES}{site.layer}": 1.0 for site in sites if site.layer is not None}
        return cls({STRENGTH: 1.0, **layers, **{f"{ROWS}{site.name}": 1.0 for site in sites}})

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers, ascending."""
        return sorted(int(key.removeprefix(EXAMPLES)) for key in self.state if key.startswith(EXAMPLES))

    @property
    def sites(self) -> list[str]:
        return [key.removeprefix(ROWS) for key in self.state if key.startswith(ROWS)]

    def examples(self, layer: int | None) -> float:
        """Return the fraction of examples with a gradient in a layer."""
        return float(self.state.get(f"{EXAMPLES}{layer}", 1.0))

    def examples_at(self, site: Site) -> float:
        """Return the fraction of a batch's examples with a gradient at a site, as a whole number of examples."""
        share = self.examples(site.layer)
        return 1.0 if share == 1.0 else count(share, site.num_examples) / site.num_examples

    def budget_at(self, site: Site) -> Budget:
        """Return the fractions of both products of a linear that are computed."""
        examples, num_rows = self.examples_at(site), math.prod(site.batch_shape)
        kept = count(self.rows(site.name), round(examples * num_rows))
        return Budget(examples, min(examples, kept / max(1, num_rows)))

    def draw_examples(self, score_B: Tensor, layer: int, generator: Generator) -> Tensor | None:
        """Return the factor of each example's gradient at a layer's output, (B,); None if it keeps all from above."""
        kept, above = (count(self.examples(number), len(score_B)) for number in (layer, layer + 1))
        if kept == above:
            return None
        index_K, weight_K = sampling.draw_by_score(score_B, kept, generator)
        return weight_K.new_zeros(len(score_B)).index_copy_(0, index_K, weight_K)

    def find_rows(self, norm_N: Tensor, site: Site) -> Tensor:
        """Return the rows of the examples that have a gradient at a site, from the norm of each row's gradient. Other
        examples have zero gradients, so the examples of largest norm are the right ones."""
        import torch

        index_N, share = torch.arange(len(norm_N), device=norm_N.device), self.examples_at(site)
        if share == 1.0:
            return index_N
        norm_BT = norm_N.view(site.num_examples, -1)
        example_K = choice.largest(choice.norm(norm_BT, 1), share)
        return index_N.view(norm_BT.shape)[example_K].flatten()

    def rows(self, site: str) -> float:
        """Return the fraction of the rows that a weight's gradient reads, among examples with a gradient."""
        return float(self.state.get(f"{ROWS}{site}", 1.0))

    def without_rows(self) -> State:
        """Return the state that draws examples but keeps all of their rows."""
        return {key: 1.0 if key.startswith(ROWS) else value for key, value in self.state.items()}


@dataclass(frozen=True)
class Round:
    """Results of a round's trial passes: for each micro-batch a dense pass and passes with a draw of examples."""

    dense: Sequence[Observation]
    sampled: Sequence[tuple[Observation, Observation]]  # each with the dense pass of its micro-batch

    @classmethod
    def of(cls, observations: Sequence[Observation], num_batches: int) -> Self:
        """Return a round from passes in order, the dense pass of each micro-batch first."""
        size = len(observations) // num_batches
        batches = [observations[start : start + size] for start in range(0, len(observations), size)]
        return cls([each[0] for each in batches], [(one, each[0]) for each in batches for one in each[1:]])

    def variance_between(self, site: str) -> float:
        """Return the variance of a weight's gradient between micro-batches, over all of its entries."""
        import torch

        samples = [sample for one in self.dense if (sample := _sample_of(one, site)) is not None]
        return float(torch.stack(samples).double().var(0).sum()) if len(samples) > 1 else 0.0

    def variance_added(self, sites: Iterable[str]) -> float:
        """Return the variance that the draw of examples added to the gradients of all weights."""
        distances = (_distance(one, dense, site) for one, dense in self.sampled for site in sites)
        return sum(distances) / len(self.sampled)

    def row_variance(self, site: str, share: float, score: Callable[[Tensor], Tensor]) -> float:
        """Return the variance that a draw of rows adds to a weight's gradient; inf for frozen or tied weights."""
        products = [one["row_product"][site] for one, _ in self.sampled if site in one["row_product"]]
        if not products:
            return math.inf
        return sum(variance_of_rows(product_N, share, score) for product_N in products) / len(products)


def control_shares(
    shares: Shares, seen: Round, tolerance: float, row_tolerance: float, score: Callable[[Tensor], Tensor]
) -> State:
    """Return the state after a round of control.

    Args:
        shares: Fractions before the round.
        seen: Gradients and norms that the trial passes measured.
        tolerance: Largest variance that the draw of examples may add, relative to that between micro-batches; 0 keeps
            all examples.
        row_tolerance: The same for the draw of rows; 0 keeps all rows.
        score: Maps norms to scores; the draw's probabilities are in proportion to them.

    Returns:
        A state with the same keys.
    """
    layers, sites = shares.layers, shares.sites
    between = {site: seen.variance_between(site) for site in sites}
    before = float(shares.state[STRENGTH])
    strength = adjust_strength(before, seen.variance_added(sites), sum(between.values()), tolerance)
    norms = [[score(one["example_norm"][str(layer)]) for one in seen.dense] for layer in layers]
    enough = [sum(find_top_share(norm_B, strength) for norm_B in batches) / len(batches) for batches in norms]
    moved = adjust_shares([shares.examples(layer) for layer in layers], enough)
    found = {STRENGTH: strength}
    for layer, share in zip(layers, moved, strict=True):
        found[f"{EXAMPLES}{layer}"] = share if tolerance else 1.0
    for site in sites:
        own = shares.rows(site)
        added = seen.row_variance(site, own, score) if between[site] else math.inf
        found[f"{ROWS}{site}"] = adjust_rows(own, added, between[site], row_tolerance)
    return found


def count(share: float, number: int) -> int:
    """Return ``share`` of ``number``, rounded down as published, at least 1."""
    # The addend keeps rounding from reducing a whole number.
    return max(1, int(share * number + 1e-9))


def variance_of_rows(product_N: Tensor, share: float, score: Callable[[Tensor], Tensor]) -> float:
    """Return the variance that a draw of rows adds to a weight's gradient. ``product_N`` has the products of the norms
    of each row's input and gradient."""
    alive_N = product_N[product_N > 0]
    if share == 1.0 or not len(alive_N):
        return 0.0
    probability_N = sampling.water_fill(score(alive_N), count(share, len(alive_N)))
    return float(sampling.variance(alive_N, probability_N))


def _sample_of(observation: Observation, site: str) -> Tensor | None:
    return observation["sample"].get(f"{site}.weight")


def _distance(one: Observation, other: Observation, site: str) -> float:
    first, second = _sample_of(one, site), _sample_of(other, site)
    return 0.0 if first is None or second is None else float((first - second).double().square().sum())


def adjust_strength(strength: float, added: float, between: float, tolerance: float) -> float:
    """Return the fraction of the examples' norms that must be kept after a round of control.

    Args:
        strength: The fraction before the round, in [0, 1].
        added: Variance that the draw of examples added.
        between: Variance between batches.
        tolerance: Largest ``added`` over ``between`` at which the fraction falls.

    Returns:
        A fraction in [0, 1].
    """
    change = STRENGTH_STEP if added > tolerance * between else -STRENGTH_STEP
    # Rounded, so that steps up and down return to the same number.
    return min(1.0, max(0.0, round(strength + change, 10)))


def find_top_share(norm_B: Tensor, strength: float) -> float:
    """Return the smallest fraction of the examples whose norms sum to ``strength`` of the total.

    Args:
        norm_B: Norm of each example's gradient, at least 0.
        strength: Fraction of the sum, in [0, 1].

    Returns:
        A fraction in (0, 1], of at least one example.
    """
    sums = norm_B.double().sort(descending=True).values.cumsum(0)
    # The factor allows for the last bit of a sum that is complete.
    reached = int((sums < strength * sums[-1] * (1 - 1e-12)).sum()) + 1
    return min(reached, len(norm_B)) / len(norm_B)


def adjust_shares(before: Sequence[float], enough: Sequence[float]) -> list[float]:
    """Return the fractions of examples by layer, moved slowly towards ``enough``, never larger than in the layer above.

    Args:
        before: Fraction of each layer, from the first, in (0, 1].
        enough: Fraction that would suffice now in each layer, in (0, 1].

    Returns:
        In (0, 1], never falling from one layer to the next.
    """
    moved = [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(before, enough, strict=True)]
    return [max(moved[: place + 1]) for place in range(len(moved))]


def adjust_rows(share: float, added: float, between: float, tolerance: float) -> float:
    """Return the fraction of rows at a linear after a round of control.

    Args:
        share: The fraction before the round, in (0, 1].
        added: Variance that the draw of rows adds.
        between: Variance between batches.
        tolerance: Largest ``added`` over ``between`` at which the fraction falls; 0 keeps all rows.

    Returns:
        A fraction in (0, 1].
    """
    if tolerance == 0.0:
        return 1.0
    return min(1.0, share / SHARE_FACTOR) if added > tolerance * between else share * SHARE_FACTOR
