"""Options of the cache in which the engine keeps outputs of frozen layers from one visit of an example to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["memory", "disk"]
Form = Literal["exact", "bfloat16", "int8"]
Padding = Literal["keep", "drop"]


@dataclass(frozen=True)
class KeptOutputs:
    """Options of a cache for outputs of frozen layers: place, dtype and size.

    Args:
        place: ``memory`` is host memory, for the life of the process. ``disk`` is a folder of the training.
        form: ``exact`` keeps every bit; ``bfloat16`` 2 bytes a number; ``int8`` one byte a number, and a scale for
            each position.
        padding: ``keep`` runs the layers on the padded batch, and reuses an output only at the same padded length.
            ``drop`` runs each example separately without padding, and reuses its output in every batch.
        max_bytes: Maximum size of the cache, at least 1. Outputs that do not fit are recomputed at each visit.
    """

    place: Place
    form: Form
    padding: Padding
    max_bytes: int
