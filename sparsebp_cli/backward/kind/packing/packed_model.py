"""What the parts of packing know of the engine and of the model that is packed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sparsebp_cli.backward.kind.packing.batch import Counts, PackedBatch
from sparsebp_cli.backward.kind.packing.dropout import AdapterDropout
from sparsebp_cli.backward.kind.packing.pair import PairPacking
from sparsebp_cli.backward.patch.forward import ModulePlaces
from sparsebp_cli.policy import BatchPacker

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class PackingEngine(Protocol):
    """What packing needs of an engine."""

    enabled: bool
    notes: dict[str, str]

    @property
    def reference(self) -> bool:
        """Whether to run the plain forward."""

    @property
    def is_probing(self) -> bool:
        """Whether the pass under way is a measurement, which trains nothing."""

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context that scales the counts at sites."""


class PackedModel(Protocol):
    """A model that is packed, as its forwards without a gradient see it."""

    policy: BatchPacker
    model: PreTrainedModel
    pair: PairPacking | None
    head: nn.Module | None
    failure: str
    dropout: AdapterDropout
    places: ModulePlaces
    engine: PackingEngine
    is_causal: bool | None

    @property
    def known_arguments(self) -> frozenset[str]:
        """Arguments of the forward that are known beside those of every model."""

    def uses_cache(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the plain forward returns a cache."""

    def count(self, batch: PackedBatch, counts: Counts) -> None:
        """Add a packed batch to counts."""
