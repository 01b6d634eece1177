"""The section ``backward`` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sparsebp_cli.recipe.section import PositiveInt, Section


class BackwardSection(Section):
    """How a step is executed. None of these changes which gradient is meant."""

    engine: Literal["fast", "reference"] = Field(
        "fast", description="fast multiplies only what was selected; reference masks the gradient and multiplies all."
    )
    sites: Literal["linears", "branches", "nodes"] = Field(
        "linears", description="Where policies are asked: every linear, residual branch, or node of the graph."
    )
    exclude: list[str] = Field(
        default_factory=list, description="Sites that stay dense: globs over module names, such as lm_head."
    )
    update: Literal["deferred", "eager"] = Field(
        "deferred",
        description="When parameters change. deferred: after the backward pass. eager: inside it, each when its "
        "gradient is complete, which is then freed.",
    )
    eager_clip: Literal["parameter", "previous", "exact"] | None = Field(
        None,
        description="With update: eager, the norm by which training.max_grad_norm clips. parameter: each gradient's "
        "own. previous: that of all gradients in the step before. exact: that of all, found by a backward of its own.",
    )
    checkpointing: Literal["none", "sparse", "full"] = Field(
        "none",
        description="What is kept for the backward. none: all that it reads. full: each layer's input, and every layer "
        "is computed again. sparse: each branch's input, and the kept rows are.",
    )
    segments: PositiveInt | Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="In how many parts of the layers forward and backward are run, or the names of the first module of "
        "each: their inputs are kept, and all but the last part are computed again. null: in one.",
    )
