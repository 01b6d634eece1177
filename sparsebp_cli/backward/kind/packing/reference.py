"""The reference of a training with preferences or rewards: a model that runs the same batches without gradient.

It is packed like the trained model, reuses the layouts of the trained model, and is never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from torch import nn

from sparsebp_cli.backward.core.given import Given
from sparsebp_cli.backward.kind.packing.packed_model import PackingEngine
from sparsebp_cli.backward.kind.packing.planner import PackingPlanner
from sparsebp_cli.backward.kind.packing.scoring import Scoring
from sparsebp_cli.errors import UnsupportedError, UsageError

TOPIC = "packing of the reference"  # the note's name in the report


@final
class PackedReference:
    """The reference model of a trained model."""

    _extension: PackingPlanner | None

    def __init__(self, extension: PackingPlanner | None, refusal: str = "") -> None:
        self._extension, self._refusal = extension, refusal

    @classmethod
    def of(cls, reference: object, trained: PackingPlanner, make: Callable[..., Any]) -> PackedReference | None:
        """Return the reference that ``attach`` got, if any.

        ``make`` makes the extension of a model. A reference that packing does not support runs plainly, and a note in
        the report says why. The trained model is packed anyway.
        """
        if not isinstance(reference, nn.Module):
            return None
        if {id(module) for module in reference.modules()} & {id(module) for module in trained.model.modules()}:
            raise UsageError(
                "reference must not be the trained model or share modules with it: leave reference out; lossless "
                "packs forwards of the trained model without gradients anyway"
            )
        try:
            extension: PackingPlanner = make(trained.policy, reference, Given())
        except UnsupportedError as error:
            return cls(None, str(error))
        extension.trains, extension.layouts, extension.scoring.topic = False, trained.layouts, TOPIC
        return cls(extension)

    @property
    def scorings(self) -> Sequence[Scoring]:
        """Its forwards without gradient; empty if the reference runs plainly."""
        return [] if self._extension is None else [self._extension.scoring]

    def install(self, engine: PackingEngine) -> None:
        """Override the model's forward."""
        if self._extension is None:
            engine.notes[TOPIC] = f"runs plainly: {self._refusal}"
            return
        self._extension.install(_ReferenceEngine(engine))

    def remove(self) -> None:
        """Restore it."""
        if self._extension is not None:
            self._extension.remove()


class _ReferenceEngine:
    """The part of the trained model's engine that the reference uses. It counts no work at sites."""

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
        """Whether the running pass is a probe."""
        return self._engine.is_probing

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return the context of the trained model's engine. No backward follows a reference's forward."""
        return self._engine.short_forward(num_rows=num_rows, scale=scale)
