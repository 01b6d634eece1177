"""Train a part of each weight: rows, columns, blocks or single entries."""

from sparsebp_shelf.part.kind import PART_SELECTOR, PartSelector, TrainedWeight, WeightGradient
from sparsebp_shelf.part.subnet import Subnet
from sparsebp_shelf.part.weight_part import WeightBlocks, WeightColumns, WeightElements, WeightPart, WeightRows

__all__ = [
    "PART_SELECTOR",
    "PartSelector",
    "Subnet",
    "TrainedWeight",
    "WeightBlocks",
    "WeightColumns",
    "WeightElements",
    "WeightGradient",
    "WeightPart",
    "WeightRows",
]
