"""Keep less of the inputs of linears."""

from sparsebp_shelf.saver.form import (
    SavedDirection,
    SavedProjection,
    SavedRows,
    SavedSketch,
)
from sparsebp_shelf.saver.kind import INPUT_SAVER, InputSaver
from sparsebp_shelf.saver.observed import LinearInput, ReaderGradients

__all__ = [
    "INPUT_SAVER",
    "InputSaver",
    "LinearInput",
    "ReaderGradients",
    "SavedDirection",
    "SavedProjection",
    "SavedRows",
    "SavedSketch",
]
