"""Define how a backward pass is executed: options of ``attach``, trainers, and a recipe's section ``backward``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, TypedDict, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.field_error import describe_errors

Sites = Literal["linears", "nodes"]
Execution = Literal["fast", "reference"]
Update = Literal["deferred", "eager"]
EagerClip = Literal["parameter", "previous", "exact"]
Checkpointing = Literal["none", "full"]


STORED = {"stored": True}  # validation context for plans of an earlier release
FORMER = ("branches", "sparse")  # values up to 0.5: their runs can be shown and compared, but not continued


def _accept_former(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    return value if info.context == STORED and value in FORMER else handler(value)


FormerToo = (WrapValidator(_accept_former), PlainSerializer(str))


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


class BackwardOptions(BaseModel):
    """Options of how a step is executed. None of them changes which gradient is computed."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    execution: Execution = Field(
        "fast",
        description="fast: multiply only the selected part of a gradient. reference: mask the gradient, and multiply "
        "all of it.",
    )
    sites: Annotated[Sites, *FormerToo] = Field(
        "linears",
        description="Where policies act. linears: at every linear layer. nodes: at every node of PyTorch's autograd "
        "graph.",
    )
    exclude: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        default_factory=list, description="Modules that stay dense: names or globs, such as lm_head."
    )
    update: Update = Field(
        "deferred",
        description="When the optimizer updates parameters. deferred: after the backward pass. eager: during the "
        "backward pass, as soon as the gradient of a parameter is complete. That gradient is then freed.",
    )
    eager_clip: EagerClip | None = Field(
        None,
        description="With 'update: eager': which norm training.max_grad_norm limits. parameter: the norm of each "
        "parameter's gradient. previous: the norm of all gradients in the previous step. exact: the norm of all "
        "gradients, from an extra backward.",
    )
    checkpointing: Annotated[Checkpointing, *FormerToo] = Field(
        "none",
        description="What the forward stores for the backward. none: everything that the backward reads. full: only "
        "the input of each layer; the backward recomputes every layer.",
    )
    segments: (
        Annotated[int, Field(ge=1)] | Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)] | None
    ) = Field(
        None,
        description="Number of parts into which the layers are divided, or the name of each part's first module. The "
        "forward stores only the input of each part. The backward recomputes every part except the last. null: one "
        "part.",
    )

    @classmethod
    def of(cls, choices: BackwardOptions | BackwardChoices | None) -> BackwardOptions:
        """Return the options: these choices, else defaults. Raise :class:`UsageError` for a wrong choice."""
        if isinstance(choices, BackwardOptions):
            return choices
        try:
            return cls.model_validate(choices or {})
        except ValidationError as error:
            finding = describe_errors(error, cls, choices)[0]
            raise UsageError(": ".join(part for part in (finding.key, finding.text) if part)) from None

    def choices(self, **changes: object) -> BackwardChoices:
        """Return the keyword arguments of ``attach``, with ``changes`` applied."""
        return cast("BackwardChoices", dict(self) | changes)


class BackwardChoices(TypedDict, total=False):
    """The fields of :class:`BackwardOptions` as keyword arguments. The class explains them."""

    execution: Execution
    sites: Sites
    exclude: Iterable[str]
    update: Update
    eager_clip: EagerClip | None
    checkpointing: Checkpointing
    segments: int | Sequence[str] | None
