"""Draw at each step how many of the last layers have a backward."""

from pydantic import Field

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_depth.kind import DepthDraw, DepthSelector


class RandomDepth(DepthSelector):
    """Run the backward of all layers at a fraction of the steps, and of a uniformly drawn number at the others."""

    card = MethodCard(use="Only as an example: its package adds its own kind of policy.", saves=("time", "memory"))

    full: float = Field(
        0.5,
        gt=0.0,
        le=1.0,
        description="Fraction of the steps whose backward runs through all layers, in (0, 1]; 1.0 is dense.",
    )

    @property
    def exact(self) -> bool:
        return self.full == 1.0

    def depth(self, num_layers: int, step: Step) -> int:
        import torch

        if self.exact:
            return num_layers
        is_full, share = torch.rand(2, generator=step.generator(DepthDraw())).tolist()
        return num_layers if is_full < self.full else 1 + int(share * num_layers)
