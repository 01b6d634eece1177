"""The part of a packed model that its forwards without gradient use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsebp_cli.backward.core.extension import EngineExtension, EngineView
from sparsebp_cli.backward.kind.packing.batch import Counts, PackedBatch
from sparsebp_cli.backward.kind.packing.dropout import AdapterDropout
from sparsebp_cli.backward.kind.packing.pair import PairPacking
from sparsebp_cli.backward.patch.forward import ModulePlaces
from sparsebp_cli.policy import BatchPacker

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class PackedModel(EngineExtension):
    """The part of a packed model that its forwards without gradient use."""

    policy: BatchPacker
    model: PreTrainedModel
    pair: PairPacking | None
    head: nn.Module | None
    failure: str
    dropout: AdapterDropout
    places: ModulePlaces
    engine: EngineView
    is_causal: bool | None

    @property
    @abstractmethod
    def known_arguments(self) -> frozenset[str]:
        """Arguments of the forward that only this model supports, besides the common ones."""

    @abstractmethod
    def uses_cache(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the plain forward returns a key/value cache."""

    @abstractmethod
    def count(self, batch: PackedBatch, counts: Counts) -> None:
        """Add a packed batch to counts."""
