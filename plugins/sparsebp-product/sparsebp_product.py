"""Keep the rows with the largest product of activation and gradient, for the weight gradient only."""

from typing import Annotated

from pydantic import Field

from sparsebp_cli.policy import Budget, InformedSelector, Reading, Rows, Seen, Site, Split, SplitTypes, Step, choice


class Product(InformedSelector):
    """Keep rows by the norm of the input times that of the gradient; the input gradient stays dense."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Share of the rows, in (0, 1]; 1.0 is dense.")

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def budget(self) -> Budget:
        return Budget(dgrad=1.0, wgrad=self.keep)

    selection = property(lambda self: None if self.exact else Rows)
    split = property(lambda self: None if self.exact else SplitTypes(dgrad=None, wgrad=Rows))

    @property
    def reads(self) -> frozenset[Reading]:
        return frozenset({"input_norm"})

    def choose(self, seen: Seen, site: Site, step: Step) -> Split | None:  # noqa: ARG002
        score_N = seen.input_norm * choice.norm(seen.grad_NO, 1)
        return None if self.exact else Split(None, choice.choose_rows(score_N, self.keep))
