"""The output of a transformers language model, and copies of it with another loss or other logits."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor

    class ModelOutput(DataclassInstance, Protocol):
        """The output of a causal language model of transformers."""

        loss: Tensor
        logits: Tensor

        def to_tuple(self) -> tuple[object, ...]:
            """Return the fields that are not None."""


def with_changes(output: ModelOutput, **changes: Tensor | None) -> ModelOutput:
    """Return a copy of a transformers output with some fields replaced. Ignore fields that it does not have.

    Assigning attributes instead would not change ``output[0]``.
    """
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    return type(output)(**(values | {name: value for name, value in changes.items() if name in values}))
