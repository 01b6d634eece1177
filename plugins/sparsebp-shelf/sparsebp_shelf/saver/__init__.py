"""Keep less of the inputs of linears."""

from sparsebp_shelf.saver.form import (
    SavedDirection,
    SavedElements,
    SavedProjection,
    SavedRepresentatives,
    SavedRows,
    SavedSketch,
)
from sparsebp_shelf.saver.kind import INPUT_SAVER, InputSaver

__all__ = [
    "INPUT_SAVER",
    "InputSaver",
    "SavedDirection",
    "SavedElements",
    "SavedProjection",
    "SavedRepresentatives",
    "SavedRows",
    "SavedSketch",
]
