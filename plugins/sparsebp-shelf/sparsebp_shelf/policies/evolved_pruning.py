"""Leave out a fraction of each epoch's examples, more often those with low losses over the epochs.

Ziheng Cheng, Zhong Li and Jiang Bian, "Data-Efficient Training by Evolved Sampling" (2025),
https://arxiv.org/abs/2509.23461: the pruning of whole epochs that turns the paper's evolved sampling into ESWP. It
follows the abstract; the recursions and their constants are not from the paper. An epoch visits a fraction of the
examples, drawn in proportion to the weights of their last visits, the same weights as in ``evolved-sampling``. We
differ: that policy draws within each batch, the other half of ESWP; one training refuses both policies together.
Examples are drawn without replacement, with the probabilities of :func:`~sparsebp_cli.policy.sampling.water_fill`. An
example that was never trained on is never left out. With ``weighted`` each loss is multiplied by 1 / probability.

Cost: only the loss of each example, which the training forward computes anyway. The policy saves steps.

Shape letters: N examples of the training data, K visited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field
from typing_extensions import override

from sparsebp_cli.policy import Epoch, EpochSelector, MethodCard, Observation, Step, Visits, choice, sampling
from sparsebp_shelf.policies.loss_average import LossAverages, averages_of, visits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsebp_cli.policy import State


@final
class EvolvedPruning(LossAverages, EpochSelector):
    """Visit a fraction of the examples in each epoch, drawn in proportion to a moving average of their losses."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For many epochs over data with easy examples. The first epoch visits all examples. Compare with "
        "by: random, and with infobatch, which is unbiased.",
        year=2025,
        saves=("steps",),
        work="1",
        memory="8 bytes for each of the training data.",
        claimed="Up to 45 % less time without loss, pre-training and fine-tuning (abstract, with sampling in batches).",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="Fraction of the examples that an epoch visits, in (0, 1]; 1.0 is dense."
    )
    weighted: bool = Field(
        False,
        description=(
            "Whether the loss of each visited example is multiplied by 1 / probability, which makes the gradient "
            "unbiased."
        ),
    )
    by: Literal["losses", "random"] = Field(
        "losses",
        description=(
            "losses: draw examples in proportion to a weight that follows their losses. random: draw them with "
            "equal probabilities, as a control."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return self.exact or self.weighted

    @property
    @override
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "evolved-pruning", **self.model_dump(mode="json"), "by": "random"}

    @override
    def init(self, places: Sequence[int], /) -> State:
        import torch

        return {**super().init(places), "weight_N": torch.zeros(len(places))}

    @override
    def observe(self, state: State, observation: Observation, step: Step) -> State:
        import torch

        weight_N, average_N = torch.as_tensor(state["weight_N"]).clone(), averages_of(state)
        for row_K, loss_K in visits_of(observation):
            weight_N[row_K] = self.weigh(average_N[row_K], loss_K.to(weight_N))
        return {**super().observe(state, observation, step), "weight_N": weight_N}

    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        import torch

        unseen_N = epoch.loss_N.isnan()
        seen_M = (~unseen_N).nonzero().flatten()
        num_drawn = choice.count_kept(self.keep, len(unseen_N)) - int(unseen_N.sum())
        if not len(seen_M) or num_drawn >= len(seen_M):
            return None
        score_M = torch.as_tensor(step.state["weight_N"])[seen_M]
        if self.by == "random":
            score_M = torch.ones_like(score_M)
        drawn_K, weight_K = sampling.draw_by_score(score_M, max(1, num_drawn), step.generator(epoch))
        factor_N = unseen_N.float()
        factor_N[seen_M[drawn_K]] = weight_K if self.weighted else 1.0
        index_K = factor_N.nonzero().flatten()
        return Visits(index_K, factor_N[index_K])
