"""How a backward pass is executed: options of ``attach``, of trainers, and of a recipe's section ``backward``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, TypedDict, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.field_error import describe_errors

Sites = Literal["linears", "branches", "nodes"]
Execution = Literal["fast", "reference"]
Update = Literal["deferred", "eager"]
EagerClip = Literal["parameter", "previous", "exact"]
Checkpointing = Literal["none", "sparse", "full"]


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


class BackwardOptions(BaseModel):
    """How a step is executed. None of these changes which gradient is meant."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    execution: Execution = Field(
        "fast", description="fast multiplies only what was selected; reference masks the gradient and multiplies all."
    )
    sites: Sites = Field(
        "linears", description="Where policies are asked: every linear, residual branch, or node of the graph."
    )
    exclude: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        default_factory=list, description="Sites that stay dense: globs over module names, such as lm_head."
    )
    update: Update = Field(
        "deferred",
        description="When parameters change. deferred: after the backward pass. eager: inside it, each when its "
        "gradient is complete, which is then freed.",
    )
    eager_clip: EagerClip | None = Field(
        None,
        description="With update: eager, the norm by which training.max_grad_norm clips. parameter: each gradient's "
        "own. previous: that of all gradients in the step before. exact: that of all, found by a backward of its own.",
    )
    checkpointing: Checkpointing = Field(
        "none",
        description="What is kept for the backward. none: all that it reads. full: each layer's input, and every layer "
        "is computed again. sparse: each branch's input, and the kept rows are.",
    )
    segments: (
        Annotated[int, Field(ge=1)] | Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)] | None
    ) = Field(
        None,
        description="In how many parts of the layers forward and backward are run, or the names of the first module of "
        "each: their inputs are kept, and all but the last part are computed again. null: in one.",
    )

    @classmethod
    def of(cls, choices: BackwardOptions | BackwardChoices | None) -> BackwardOptions:
        """Return the options with these choices, the rest at their defaults; a wrong one is a :class:`UsageError`."""
        if isinstance(choices, BackwardOptions):
            return choices
        try:
            return cls.model_validate(choices or {})
        except ValidationError as error:
            finding = describe_errors(error, cls, choices)[0]
            raise UsageError(": ".join(part for part in (finding.key, finding.text) if part)) from None

    def choices(self, **changes: object) -> BackwardChoices:
        """Return the keyword arguments of ``attach``, some of them changed."""
        return cast("BackwardChoices", dict(self) | changes)


class BackwardChoices(TypedDict, total=False):
    """The fields of :class:`BackwardOptions` as keyword arguments; see there for their meaning."""

    execution: Execution
    sites: Sites
    exclude: Iterable[str]
    update: Update
    eager_clip: EagerClip | None
    checkpointing: Checkpointing
    segments: int | Sequence[str] | None
