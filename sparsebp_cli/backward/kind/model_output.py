"""What a language model of transformers returns, and a copy of it with another loss or other logits."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor

    class ModelOutput(DataclassInstance, Protocol):
        """What a causal language model of transformers returns."""

        loss: Tensor
        logits: Tensor

        def to_tuple(self) -> tuple[object, ...]:
            """Return the fields that are not None."""


def with_changes(output: ModelOutput, **changes: Tensor | None) -> ModelOutput:
    """Return a copy of a transformers output with some fields replaced; fields that it does not have are ignored.

    Assigning attributes instead would not change ``output[0]``.
    """
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    return type(output)(**(values | {name: value for name, value in changes.items() if name in values}))
