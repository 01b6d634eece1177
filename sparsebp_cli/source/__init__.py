"""The models and data that a recipe names: where a name leads, and what a first look tells without torch or network."""

from sparsebp_cli.source.data import LOADERS, TEXT_FEATURES, check_text, missing_column, missing_split, refuse_deep
from sparsebp_cli.source.folder import check_folder
from sparsebp_cli.source.look import Look, look
from sparsebp_cli.source.model import read_config, refuse_mismatch, refuse_too_long
from sparsebp_cli.source.name import DATASETS, MODELS, find_here, find_source

__all__ = [
    "DATASETS",
    "LOADERS",
    "MODELS",
    "TEXT_FEATURES",
    "Look",
    "check_folder",
    "check_text",
    "find_here",
    "find_source",
    "look",
    "missing_column",
    "missing_split",
    "read_config",
    "refuse_deep",
    "refuse_mismatch",
    "refuse_too_long",
]
