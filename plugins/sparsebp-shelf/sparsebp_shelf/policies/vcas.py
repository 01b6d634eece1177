"""Keep few examples at each layer's output and few rows at each linear layer, within a limit on the added variance.

Ziteng Wang, Jianfei Chen and Jun Zhu, "Efficient Backpropagation with Variance-Controlled Adaptive Sampling" (ICLR
2024), https://arxiv.org/abs/2402.17227. At each layer's output, the policy draws examples by the norm of their
gradient, never more than in the layer above. Rows of each weight gradient are drawn by the product of the norms of
input and gradient. What is kept is divided by its probability. Trial passes measure the variance that both draws add,
and adapt the fractions. We differ: we keep exactly the number that the fractions give; the paper's number is random. We
measure the variance between micro-batches in training order. Linear layers outside of the transformer layers, such as
the head, also draw rows.

Cost: with the fraction r of the examples, a layer computes r of both products, and of the weight gradient only r times
the fraction of rows. Each round of trial passes costs ``batches`` dense passes and ``batches`` squared sampled passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field, PositiveInt

from sparsebp_cli.policy import (
    Budget,
    InformedSelector,
    LayerGradient,
    Measure,
    MethodCard,
    Observation,
    Observed,
    ParameterGradient,
    Reading,
    Rows,
    Seen,
    Site,
    SiteGradient,
    Split,
    SplitTypes,
    Stateful,
    Step,
    TrialPass,
    choice,
)
from sparsebp_shelf import sampling
from sparsebp_shelf.gradient_sample import sample_gradient
from sparsebp_shelf.layer_sampler import LayerOutput, LayerSampler
from sparsebp_shelf.policies.variance_control import Round, Shares, control_shares, count

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import State


@final
class VCAS(Stateful[Site], LayerSampler, InformedSelector):
    """Draw examples at each layer and rows at each linear, as few as a tolerance for the added variance allows."""

    constants: ClassVar[tuple[str, ...]] = ("tolerance", "row_tolerance")
    card: ClassVar[MethodCard | None] = MethodCard(
        use="If a batch has many examples with unequal gradients, such as late in fine-tuning.",
        year=2024,
        saves=("time",),
        memory="As dense.",
        claimed="44 % fewer FLOPs and 19 % less time at equal accuracy; BERT-large on MNLI.",
        code="thu-ml/VCAS, Apache-2.0; draws each row separately, so the CPU waits for the number of rows.",
    )

    tolerance: Annotated[float, Field(ge=0.0)] = Field(
        0.025,
        description=(
            "Variance that drawing examples may add, as a fraction of the variance between batches. 0: keep all "
            "examples."
        ),
    )
    row_tolerance: Annotated[float, Field(ge=0.0)] = Field(
        0.025,
        description=(
            "Variance that drawing rows may add at each linear layer, as a fraction of the variance between "
            "batches. 0: keep all rows."
        ),
    )
    every: PositiveInt = Field(
        100,
        description=(
            "Number of steps between two rounds of trial passes, which measure the variance and adapt how much is kept."
        ),
    )
    batches: Annotated[int, Field(ge=2)] = Field(
        2, description="Micro-batches in each round of trial passes, which measure variance and train nothing."
    )
    by: Literal["norm", "uniform"] = Field(
        "norm",
        description="Probabilities of the draw. norm: in proportion to the norms. uniform: all equal, as a control.",
    )

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
    def selection(self) -> type[Rows] | None:
        return None if self.exact else Rows

    @property
    def split(self) -> SplitTypes | None:
        return None if self.exact else SplitTypes(Rows, Rows)

    @property
    def control(self) -> dict[str, object] | None:
        uniform = {"name": "vcas", **self.model_dump(mode="json"), "by": "uniform"}
        return None if self.exact or self.by == "uniform" else uniform

    @property
    def reads(self) -> frozenset[Reading]:
        return frozenset() if self.exact else frozenset({"input_norm"})

    @property
    def has_trials(self) -> bool:
        return not self.exact

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.exact else frozenset({ParameterGradient, SiteGradient, LayerGradient})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:
        if isinstance(seen, ParameterGradient):
            return {"sample": Measure(sample_gradient(seen.gradient, seen.name, step))}
        if isinstance(seen, SiteGradient):  # for each row, the product of the norms of its input and gradient
            return {"row_product": Measure(choice.norm(seen.shown.grad_NO, 1) * seen.shown.input_norm)}
        assert isinstance(seen, LayerGradient)
        return {"example_norm": Measure(seen.norm_B)}

    def init(self, places: Sequence[Site], /) -> State:
        return Shares.full(places).state

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        return state

    def wants_trials(self, step: Step) -> Sequence[TrialPass]:
        if self.exact or step.index == 0 or step.index % self.every:
            return ()
        states = [dict.fromkeys(step.state, 1.0), *[Shares(step.state).without_rows()] * self.batches]
        return [
            TrialPass(batch, draw, state) for batch in range(self.batches) for draw, state in enumerate(states, start=1)
        ]

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        seen = Round.of(observations, self.batches)
        return control_shares(Shares(state), seen, self.tolerance, self.row_tolerance, self._score)

    def sample(self, norm_B: Tensor, output: LayerOutput, step: Step) -> Tensor | None:
        score_B, generator = self._score(norm_B), step.generator(output, norm_B.device)
        return Shares(step.state).draw_examples(score_B, output.layer, generator)

    def budget_at(self, site: Site, step: Step) -> Budget:
        return Shares(step.state).budget_at(site)

    def choose(self, seen: Seen, site: Site, step: Step) -> Split | None:
        if self.exact:
            return None
        shares, norm_N = Shares(step.state), choice.norm(seen.grad_NO, 1)
        index_N = shares.find_rows(norm_N, site)
        dgrad, share = None if len(index_N) == len(norm_N) else Rows(index_N), shares.rows(site.name)
        if share == 1.0 or not seen.needs_wgrad:
            return Split(dgrad, dgrad, full_bias=True)
        score_K = self._score((norm_N * seen.input_norm)[index_N])
        num_kept, generator = count(share, len(index_N)), step.generator(site, norm_N.device)
        place_K, weight_K = sampling.draw_by_score(score_K, num_kept, generator)
        return Split(dgrad, Rows(index_N[place_K], weight_K), full_bias=True)

    def _score(self, norm: Tensor) -> Tensor:
        """Return the scores for the draw, from norms."""
        return norm if self.by == "norm" else (norm > 0).to(norm.dtype)
