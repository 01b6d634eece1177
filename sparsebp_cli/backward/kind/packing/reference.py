"""The reference of a training with preferences or rewards: a model that runs the same batches without gradient.

It is packed like the trained model, reuses the layouts of the trained model, and is never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn

from sparsebp_cli.backward.core.extension import EngineView
from sparsebp_cli.backward.core.given import Given
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
                "reference must not be the trained model or share modules with it: leave reference out; lossless also "
                "packs the forwards that the trained model runs under torch.no_grad()"
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

    def install(self, engine: EngineView) -> None:
        """Override the model's forward."""
        if self._extension is None:
            engine.notes[TOPIC] = f"the reference model runs without lossless: {self._refusal}"
            return
        self._extension.install(engine)

    def remove(self) -> None:
        """Restore it."""
        if self._extension is not None:
            self._extension.remove()
