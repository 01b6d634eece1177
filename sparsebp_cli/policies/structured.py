"""The base class of gradient selectors that score rows, columns, blocks or entries, with their shared options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from sparsebp_cli.policy import (
    Blocks,
    Columns,
    Elements,
    GradientSelector,
    Rows,
    Selection,
    Site,
    TwoToFour,
    choice,
)

if TYPE_CHECKING:
    from torch import Tensor

_SELECTIONS: dict[str, type[Selection]] = {
    "rows": Rows,
    "columns": Columns,
    "blocks": Blocks,
    "elements": Elements,
    "2:4": TwoToFour,
}
_PLACES = {"rows": ("batch", "example"), "elements": ("batch", "example", "row")}


class StructuredSelector(GradientSelector):
    """A gradient selector that scores parts of the gradient and keeps the parts of largest score."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Fraction of the gradient to keep; 1.0 is dense.")
    along: Literal["rows", "columns", "blocks", "elements", "2:4"] = Field(
        "rows",
        description="What is selected. rows: token positions. columns: output features. blocks: rectangles of "
        "positions and features. elements: single entries. 2:4: two of every four neighbouring features in each row.",
    )
    within: Literal["batch", "example", "row"] = Field(
        "batch", description="Whether keep is a fraction of the whole gradient, of each example or of each row."
    )
    block: tuple[PositiveInt, PositiveInt] = Field((32, 32), description="Size of a block: positions, output features.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        places = _PLACES.get(self.along, ("batch",))
        if self.within not in places:
            raise ValueError(
                f"'within: {self.within}' is not allowed with 'along: {self.along}'; allowed: {', '.join(places)}"
            )
        if self.along == "2:4" and self.keep not in (0.5, 1.0):
            raise ValueError(f"with 'along: 2:4', keep must be 0.5 (two of four), or 1.0 for dense, got {self.keep}")
        return self

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.exact else _SELECTIONS[self.along]

    def score_shape(self, grad_NO: Tensor) -> tuple[int, ...]:
        """Return the shape that :meth:`choose` expects: one score a row, feature, block or entry."""
        num_rows, num_columns = grad_NO.shape
        if self.along == "blocks":
            rows, columns = choice.fit_block(self.block, grad_NO)
            return -(-num_rows // rows), -(-num_columns // columns)
        return {"rows": (num_rows,), "columns": (num_columns,)}.get(self.along, (num_rows, num_columns))

    def choose(self, score: Tensor, grad_NO: Tensor, site: Site) -> Selection:
        """Return the unweighted selection of the largest scores. ``score`` has the shape of :meth:`score_shape`."""
        examples = site.num_examples if self.within == "example" else 1
        if self.along == "rows":
            return choice.choose_rows(score, self.keep, examples)
        if self.along == "columns":
            return choice.choose_columns(score, self.keep)
        if self.along == "blocks":
            return choice.choose_blocks(score, self.keep, choice.fit_block(self.block, grad_NO))
        if self.along == "2:4":
            return choice.choose_two_of_four(score)
        return choice.choose_elements(score, self.keep, len(grad_NO) if self.within == "row" else examples)
