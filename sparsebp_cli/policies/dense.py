"""Keep every gradient: the baseline of all other policies.

Backpropagation as in David E. Rumelhart, Geoffrey E. Hinton and Ronald J. Williams, "Learning representations by
back-propagating errors" (Nature 323, 1986), https://doi.org/10.1038/323533a0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from sparsebp_cli.policy import GradientSelector, MethodCard, Selection, Site, Step

if TYPE_CHECKING:
    import torch


@final
class Dense(GradientSelector):
    """Keep everything."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="As the baseline. With a smaller batch, as the baseline of equal cost.",
        year=1986,
        work="1",
        memory="The input of every linear layer.",
    )

    @property
    def exact(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def selection(self) -> None:
        return None

    @override
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return None
