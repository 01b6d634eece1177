"""Keep the largest entries of each linear's input for the gradient of its weight.

Joya Chen, Kai Xu, Yuhui Wang, Yifei Cheng and Angela Yao, "DropIT: Dropping Intermediate Tensors for Memory-Efficient
DNN Training" (ICLR 2023), https://arxiv.org/abs/2202.13808. We differ: an entry's number takes 4 bytes, and only
linears keep less, not convolutions. Back Razor (Ziyu Jiang et al., NeurIPS 2022) uses the same method for each example,
which is ``within: example`` here. It also covers attention's probabilities and the inputs of nonlinear operators.

Shape letters: B examples, E entries of an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy import MethodCard, Site, Step, choice
from sparsebp_shelf.saver import InputSaver, SavedElements

if TYPE_CHECKING:
    from torch import Tensor


@final
class DropIT(InputSaver):
    """Keep the entries of largest magnitude; the gradient is biased."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To study what the largest entries train. An unbiased saver of the same size is safer: gact or wta-crs.",
        year=2023,
        saves=("memory",),
        work="1",
        memory="keep N D entries of s bytes, and 4 bytes each for their numbers.",
        claimed="Up to 90 % of the entries left out at higher accuracy, vision transformers and convolutional "
        "networks (abstract).",
        code="Read for no part of this.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.2, description="Fraction of each linear layer's input that is kept for the backward, in (0, 1]; 1.0 is dense."
    )
    within: Literal["input", "example"] = Field(
        "input",
        description=(
            "input: keep the largest entries of the whole input. example: keep the largest entries of each example."
        ),
    )
    by: Literal["size", "random"] = Field(
        "size",
        description=(
            "size: keep the largest entries. random: keep as many random entries, without weights, as a control."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def form(self) -> type[SavedElements] | None:
        return None if self.exact else SavedElements

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "dropit", **self.model_dump(mode="json"), "by": "random"}

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedElements | None:
        if self.exact:
            return None
        import torch

        score_ND = x_ND.abs()
        if self.by == "random":
            generator = step.generator(site, x_ND.device)
            score_ND = torch.rand(x_ND.shape, generator=generator, device=x_ND.device)
        num_kept = choice.count_kept(self.keep, x_ND.numel())
        num_examples = site.num_examples if self.within == "example" and len(x_ND) % site.num_examples == 0 else 1
        return SavedElements.of(x_ND, find_largest(score_ND.reshape(num_examples, -1), num_kept))

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        number = num_rows * num_features
        if self.exact:
            return number * itemsize
        return SavedElements.count_bytes(choice.count_kept(self.keep, number), number, itemsize)


def find_largest(score_BE: Tensor, num_kept: int) -> Tensor:
    """Return the numbers of the largest scores of each example, in order.

    Args:
        score_BE: Scores of each example's entries.
        num_kept: K, of all examples together; if B does not divide it, the first examples keep one more.

    Returns:
        int64, (K,), numbered across all examples.
    """
    import torch

    number, length = score_BE.shape
    base, more = divmod(num_kept, number)
    order_BE = score_BE.topk(min(length, base + bool(more)), dim=1).indices
    start_B = torch.arange(number, device=score_BE.device)[:, None] * length
    found = order_BE + start_B
    parts = (found[:more].flatten(), found[more:, :base].flatten())
    return torch.cat(parts).sort().values
