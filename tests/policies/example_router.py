"""Go on only into children whose gradient is not small beside the largest. A whole plugin, but for its pyproject."""

from collections.abc import Sequence

from pydantic import Field

from sparsebp_cli.policy import Edge, EdgeRouter, Step


class SkipSmall(EdgeRouter):
    """Leave out children whose gradient is smaller than a share of the largest child's."""

    share: float = Field(0.5, ge=0.0, le=1.0, description="Of the largest child's size; 0 goes everywhere.")

    @property
    def exact(self) -> bool:
        return self.share == 0.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
        sizes = self.sizes([edge.gradient for edge in edges])
        return [i for i, size in enumerate(sizes) if size >= self.share * max(sizes)]
