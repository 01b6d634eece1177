"""Keep some examples of the gradient at each layer's output and some rows for each weight's gradient, as few as leave
the variance of the gradient where it was.

Ziteng Wang, Jianfei Chen and Jun Zhu, "Efficient Backpropagation with Variance-Controlled Adaptive Sampling" (ICLR
2024), https://arxiv.org/abs/2402.17227. Examples are drawn by the norm of their gradient at the output of each
layer, never more in a layer than in the one above, and rows of each weight's gradient by the product of the norms of
input and gradient. What is drawn is divided by its probability. Every ``every`` steps trial passes over ``batches``
micro-batches measure the variance that both draws add; shares fall where it is below ``tolerance`` of the variance
between batches, and rise where it is above. We differ: as many are drawn as the shares say, where the paper's number
is random; the variance between batches is that of micro-batches in the order of training; and rows are drawn at
linears outside of the layers, too, such as the head, unless they are excluded.

Cost: a layer with the share r of the examples multiplies r of both products, and of the weight's gradient r times
its own share. Each round of control costs ``batches`` dense passes and ``batches`` squared sampled ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field, PositiveInt

from sparsebp_cli.policy import (
    Budget,
    InformedSelector,
    LayerOutput,
    LayerSampler,
    MethodCard,
    Observation,
    Observed,
    Reading,
    Rows,
    Seen,
    Selection,
    Site,
    Split,
    SplitTypes,
    Stateful,
    Step,
    TrialPass,
    choice,
    sampling,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy.contract import State

STRENGTH_STEP, SHARE_FACTOR, MOMENTUM = 0.01, 0.95, 0.6  # alpha, beta, and of the examples' shares, as published
STRENGTH, EXAMPLES, ROWS = "strength", "examples ", "rows "  # of entries of the state, the last two by layer and site


@final
class VCAS(Stateful[Site], LayerSampler, InformedSelector):
    """Draw examples at each layer and rows at each linear, by shares that keep the added variance at a tolerance."""

    constants: ClassVar[tuple[str, ...]] = ("tolerance", "row_tolerance")
    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where a batch has many examples of unequal gradient, as late in fine-tuning. Few examples a batch leave "
        "little to choose.",
        year=2024,
        saves=("time",),
        memory="As dense.",
        claimed="44 % fewer FLOPs and 19 % less time at even accuracy, BERT-large on MNLI.",
        code="thu-ml/VCAS, Apache-2.0; draws each row on its own, so that the host waits for their number.",
    )

    tolerance: Annotated[float, Field(ge=0.0)] = Field(
        0.025, description="Of the examples' draw: variance added, over that between batches. 0: all examples stay."
    )
    row_tolerance: Annotated[float, Field(ge=0.0)] = Field(
        0.025, description="Of the rows' draw at each linear: the same. 0: all rows stay."
    )
    every: PositiveInt = Field(100, description="Steps between two rounds of control.")
    batches: Annotated[int, Field(ge=2)] = Field(2, description="Micro-batches that a round of control measures.")
    by: Literal["norm", "uniform"] = Field("norm", description="Probabilities by the norms, or all alike, the control.")

    @property
    def exact(self) -> bool:
        return self.tolerance == self.row_tolerance == 0.0

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> Budget:
        return Budget(1.0, 1.0)

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.exact else Rows

    @property
    def split(self) -> SplitTypes | None:
        return None if self.exact else SplitTypes(Rows, Rows)

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "uniform":
            return None
        return {"name": "vcas", **self.model_dump(mode="json"), "by": "uniform"}

    @property
    def reads(self) -> frozenset[Reading]:
        return frozenset() if self.exact else frozenset({"input_norm"})

    @property
    def has_trials(self) -> bool:
        return not self.exact

    @property
    def observes(self) -> frozenset[Observed]:
        return frozenset({"gradient_sample", "row_product", "example_norm"})

    def init(self, places: Sequence[Site], /) -> State:
        layers = {f"{EXAMPLES}{site.layer}": 1.0 for site in places if site.layer is not None}
        return {STRENGTH: 1.0, **layers, **{f"{ROWS}{site.name}": 1.0 for site in places}}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        return state

    def wants_trials(self, step: Step) -> Sequence[TrialPass]:
        if self.exact or step.index == 0 or step.index % self.every:
            return ()
        dense = dict.fromkeys(step.state, 1.0)
        sampled = {key: 1.0 if key.startswith(ROWS) else value for key, value in step.state.items()}
        return [
            TrialPass(batch, 1 + number, dense if number == 0 else sampled)
            for batch in range(self.batches)
            for number in range(1 + self.batches)
        ]

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        size = 1 + self.batches
        rounds = [observations[start : start + size] for start in range(0, len(observations), size)]
        numbers = {key: float(value) for key, value in state.items()}
        sites = [key.removeprefix(ROWS) for key in numbers if key.startswith(ROWS)]
        between = {site: _variance_between([passes[0] for passes in rounds], site) for site in sites}
        drawn = [(one, passes[0]) for passes in rounds for one in passes[1:]]
        added = sum(_distance(one, dense, site) for one, dense in drawn for site in sites) / len(drawn)
        strength = adjust_strength(numbers[STRENGTH], added, sum(between.values()), self.tolerance)
        layers = sorted(int(key.removeprefix(EXAMPLES)) for key in numbers if key.startswith(EXAMPLES))
        norms = [[passes[0].example_norm[str(layer)] for passes in rounds] for layer in layers]
        if self.by == "uniform":
            norms = [[(norm_B > 0).to(norm_B.dtype) for norm_B in batches] for batches in norms]
        enough = [sum(find_top_share(norm_B, strength) for norm_B in batches) / len(batches) for batches in norms]
        found = {STRENGTH: strength, **{key: value for key, value in numbers.items() if key.startswith(ROWS)}}
        before = [numbers[f"{EXAMPLES}{layer}"] for layer in layers]
        for layer, share in zip(layers, adjust_shares(before, enough), strict=True):
            found[f"{EXAMPLES}{layer}"] = share if self.tolerance else 1.0
        for site in sites:
            products = [one.row_product[site] for one, _ in drawn if site in one.row_product]
            own, added = numbers[f"{ROWS}{site}"], math.inf  # of a weight that is frozen, or tied to the embedding
            if between[site] and products:
                added = sum(self._row_variance(product, own) for product in products) / len(products)
            found[f"{ROWS}{site}"] = adjust_rows(own, added, between[site], self.row_tolerance)
        return found

    def sample(self, norm_B: Tensor, output: LayerOutput, step: Step) -> Tensor | None:
        number = len(norm_B)
        kept, above = (self._count(layer, number, step) for layer in (output.layer, output.layer + 1))
        if kept == above:
            return None  # those of the layer above are all kept
        score_B = norm_B if self.by == "norm" else (norm_B > 0).to(norm_B.dtype)
        probability_B = sampling.water_fill(score_B, kept)
        index_K = sampling.draw(probability_B, kept, step.generator(output, norm_B.device))
        weight_K = sampling.weigh(probability_B, index_K)
        return weight_K.new_zeros(number).index_copy_(0, index_K, weight_K)

    def budget_at(self, site: Site, step: Step) -> Budget:
        examples, num_rows = self._share(site, step), math.prod(site.batch_shape)
        kept = _count(float(step.state.get(f"{ROWS}{site.name}", 1.0)), round(examples * num_rows))
        return Budget(examples, min(examples, kept / max(1, num_rows)))

    def choose(self, seen: Seen, site: Site, step: Step) -> Split | None:
        if self.exact:
            return None
        import torch

        grad_NO, num_rows = seen.grad_NO, len(seen.grad_NO)
        norm_N = choice.norm(grad_NO, 1)
        index_N = torch.arange(num_rows, device=grad_NO.device)
        if self._share(site, step) < 1.0:  # the others' gradient is zero: the largest were drawn
            norm_BT = norm_N.view(site.num_examples, -1)
            kept = self._count(site.layer, site.num_examples, step)
            example_K = choice.norm(norm_BT, 1).topk(kept, sorted=False).indices.sort().values
            index_N = index_N.view(norm_BT.shape)[example_K].flatten()
        share = float(step.state.get(f"{ROWS}{site.name}", 1.0))
        dgrad = None if len(index_N) == num_rows else Rows(index_N)
        if share == 1.0 or not seen.needs_wgrad:
            return Split(dgrad, dgrad, full_bias=True)
        score_K = (norm_N * seen.input_norm)[index_N]
        if self.by == "uniform":
            score_K = torch.ones_like(score_K)
        number = _count(share, len(index_N))
        probability_K = sampling.water_fill(score_K, number)
        place = sampling.draw(probability_K, number, step.generator(site, grad_NO.device))
        return Split(dgrad, Rows(index_N[place], sampling.weigh(probability_K, place)), full_bias=True)

    def _count(self, layer: int | None, number: int, step: Step) -> int:
        """Return how many of a batch's examples have a gradient in a layer."""
        return _count(float(step.state.get(f"{EXAMPLES}{layer}", 1.0)), number)

    def _share(self, site: Site, step: Step) -> float:
        if site.layer is None or not step.state or float(step.state.get(f"{EXAMPLES}{site.layer}", 1.0)) == 1.0:
            return 1.0
        return self._count(site.layer, site.num_examples, step) / site.num_examples

    def _row_variance(self, product_N: Tensor, share: float) -> float:
        import torch

        alive_N = product_N[product_N > 0]
        if share == 1.0 or not len(alive_N):
            return 0.0
        score_N = alive_N if self.by == "norm" else torch.ones_like(alive_N)
        return float(sampling.variance(alive_N, sampling.water_fill(score_N, _count(share, len(alive_N)))))


def _count(share: float, number: int) -> int:
    """Return how many a share keeps, rounded down as published, at least 1."""
    return max(1, int(share * number + 1e-9))


def _sample_of(observation: Observation, site: str) -> Tensor | None:
    return observation.gradient_sample.get(f"{site}.weight")


def _variance_between(dense: Sequence[Observation], site: str) -> float:
    """Return the variance of a weight's gradient between batches, over all of its entries."""
    import torch

    samples = [sample for one in dense if (sample := _sample_of(one, site)) is not None]
    return float(torch.stack(samples).double().var(0).sum()) if len(samples) > 1 else 0.0


def _distance(one: Observation, other: Observation, site: str) -> float:
    first, second = _sample_of(one, site), _sample_of(other, site)
    return 0.0 if first is None or second is None else float((first - second).double().square().sum())


def adjust_strength(strength: float, added: float, between: float, tolerance: float) -> float:
    """Return the share of the examples' norms that has to be kept, after a round of control.

    Args:
        strength: Before, in [0, 1].
        added: Variance that the draw of examples added.
        between: Variance between batches.
        tolerance: Of the first over the second.

    Returns:
        In [0, 1].
    """
    change = STRENGTH_STEP if added > tolerance * between else -STRENGTH_STEP
    return min(1.0, max(0.0, round(strength + change, 10)))


def find_top_share(norm_B: Tensor, strength: float) -> float:
    """Return the smallest share of the examples whose norms sum to a share of all.

    Args:
        norm_B: At least 0.
        strength: The share of the sum, in [0, 1].

    Returns:
        In (0, 1]: at least one example.
    """
    sums = norm_B.double().sort(descending=True).values.cumsum(0)
    reached = int((sums < strength * sums[-1] * (1 - 1e-12)).sum()) + 1
    return min(reached, len(norm_B)) / len(norm_B)


def adjust_shares(before: Sequence[float], enough: Sequence[float]) -> list[float]:
    """Return the shares of examples by layer, from the first: slowly towards what is enough, never more than above.

    Args:
        before: In (0, 1].
        enough: What would do now, in (0, 1].

    Returns:
        In (0, 1], never falling from one layer to the next.
    """
    moved = [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(before, enough, strict=True)]
    return [max(moved[: place + 1]) for place in range(len(moved))]


def adjust_rows(share: float, added: float, between: float, tolerance: float) -> float:
    """Return the share of rows at a linear after a round of control.

    Args:
        share: Before, in (0, 1].
        added: Variance that the draw of rows adds.
        between: Variance between batches.
        tolerance: Of the first over the second; 0 keeps all rows.

    Returns:
        In (0, 1].
    """
    if tolerance == 0.0:
        return 1.0
    return min(1.0, share / SHARE_FACTOR) if added > tolerance * between else share * SHARE_FACTOR
