"""Protocols of the engine and of the packed model, for the modules of packing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.kind.packing.batch import Counts, PackedBatch
from sparsebp_cli.backward.kind.packing.dropout import AdapterDropout
from sparsebp_cli.backward.kind.packing.pair import PairPacking
from sparsebp_cli.backward.patch.forward import ModulePlaces
from sparsebp_cli.policy import BatchPacker

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class PackingEngine(Protocol):
    """The part of the engine that packing uses."""

    enabled: bool
    notes: dict[str, str]

    @property
    def reference(self) -> bool:
        """Whether to run the plain forward."""

    @property
    def is_probing(self) -> bool:
        """Whether the running pass is a probe, which trains nothing."""

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context that scales the counts at sites."""


class PackedModel(EngineExtension):
    """The part of a packed model that its forwards without gradient use."""

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
    @abstractmethod
    def known_arguments(self) -> frozenset[str]:
        """Arguments of the forward that only this model supports, besides the common ones."""

    @abstractmethod
    def install(self, engine: PackingEngine) -> None:
        """Override the model's forward."""

    @abstractmethod
    def uses_cache(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the plain forward returns a key/value cache."""

    @abstractmethod
    def count(self, batch: PackedBatch, counts: Counts) -> None:
        """Add a packed batch to counts."""
