"""The reference of a training with preferences or rewards: a model that runs the same batches without a gradient.

It is packed as the trained model is, takes the layouts that were made for that one, and is never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

from torch import nn

from sparsebp_cli.backward.core.given import Given
from sparsebp_cli.backward.kind.packing.packed_model import PackedModel, PackingEngine
from sparsebp_cli.backward.kind.packing.remembered import LastLayout
from sparsebp_cli.backward.kind.packing.scoring import Scoring
from sparsebp_cli.errors import UnsupportedError, UsageError

TOPIC = "packing of the reference"  # the note's name in the report


class PackedForwards(PackedModel, Protocol):
    """A model that is packed, with its layouts and what installs it."""

    layouts: LastLayout
    scoring: Scoring
    trains: bool

    def install(self, engine: PackingEngine) -> None:
        """Override its forward."""

    def remove(self) -> None:
        """Restore it."""


@final
class PackedReference:
    """A reference beside the model that is trained."""

    _extension: PackedForwards | None

    def __init__(self, extension: PackedForwards | None, refusal: str = "") -> None:
        self._extension, self._refusal = extension, refusal

    @classmethod
    def of(cls, reference: object, trained: PackedForwards, make: Callable[..., Any]) -> PackedReference | None:
        """Return the reference that ``attach`` was given; None if it was given none.

        ``make`` makes the extension of a model. A reference whose rows cannot be left out stays as it is, and the note
        says why: what is trained is packed all the same.
        """
        if not isinstance(reference, nn.Module):
            return None
        if {id(module) for module in reference.modules()} & {id(module) for module in trained.model.modules()}:
            raise UsageError(
                "reference must be another model, but it is the trained one or shares modules with it: leave it out; "
                "forwards of the trained model without a gradient are packed anyway"
            )
        try:
            extension: PackedForwards = make(trained.policy, reference, Given())
        except UnsupportedError as error:
            return cls(None, str(error))
        extension.trains, extension.layouts, extension.scoring.topic = False, trained.layouts, TOPIC
        return cls(extension)

    @property
    def scorings(self) -> Sequence[Scoring]:
        """Its forwards without a gradient; none where it stays as it is."""
        return [] if self._extension is None else [self._extension.scoring]

    def install(self, engine: PackingEngine) -> None:
        """Override its forward."""
        if self._extension is None:
            engine.notes[TOPIC] = f"runs plainly: {self._refusal}"
            return
        self._extension.install(_ReferenceEngine(engine))

    def remove(self) -> None:
        """Restore it."""
        if self._extension is not None:
            self._extension.remove()


class _ReferenceEngine:
    """The engine of the trained model as the reference sees it: it counts no work at sites."""

    def __init__(self, engine: PackingEngine) -> None:
        self._engine, self.notes = engine, engine.notes

    @property
    def enabled(self) -> bool:
        """Whether policies are active."""
        return self._engine.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._engine.enabled = enabled

    @property
    def reference(self) -> bool:
        """Whether to run the plain forward."""
        return self._engine.reference

    @property
    def is_probing(self) -> bool:
        """Whether the pass under way is a measurement."""
        return self._engine.is_probing

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context of the trained model's engine; no backward follows a reference's forward."""
        return self._engine.short_forward(num_rows=num_rows, scale=scale)
