"""What a policy says of the outputs of frozen layers that the engine keeps from one visit of an example to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["memory", "disk"]
Form = Literal["exact", "bfloat16", "int8"]
Padding = Literal["keep", "drop"]


@dataclass(frozen=True)
class KeptOutputs:
    """Where outputs are kept, in which form, and how much of them.

    Args:
        place: ``memory`` is that of the host, and lasts as long as the process; ``disk`` is a folder of the training.
        form: ``exact`` keeps every bit; ``bfloat16`` 2 bytes a number; ``int8`` one byte a number, and a scale for
            each position.
        padding: ``keep`` runs the layers on the batch as it is, and knows an example again at the same padded length;
            ``drop`` runs each example on its own, without padding, and knows it again in every batch.
        max_bytes: Bytes of all that is kept, at least 1; what does not fit is computed at each visit.
    """

    place: Place
    form: Form
    padding: Padding
    max_bytes: int
