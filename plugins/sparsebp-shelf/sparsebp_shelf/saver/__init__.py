"""Keep less of the inputs of linears."""

from sparsebp_shelf.saver.form import (
    SavedDirection,
    SavedProjection,
    SavedRows,
    SavedSketch,
)
from sparsebp_shelf.saver.kind import INPUT_SAVER, InputSaver

__all__ = [
    "INPUT_SAVER",
    "InputSaver",
    "SavedDirection",
    "SavedProjection",
    "SavedRows",
    "SavedSketch",
]
