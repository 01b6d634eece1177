"""Models and data that a recipe names: resolving names, and checks without torch or network."""

from sparsebp_cli.source.data import LOADERS, TEXT_FEATURES, check_text, missing_column, missing_split, refuse_deep
from sparsebp_cli.source.folder import check_folder
from sparsebp_cli.source.inspection import Problem, inspect_sources
from sparsebp_cli.source.model import read_config, refuse_mismatch, refuse_too_long
from sparsebp_cli.source.name import DATASETS, MODELS, find_path, find_source

__all__ = [
    "DATASETS",
    "LOADERS",
    "MODELS",
    "TEXT_FEATURES",
    "Problem",
    "check_folder",
    "check_text",
    "find_path",
    "find_source",
    "inspect_sources",
    "missing_column",
    "missing_split",
    "read_config",
    "refuse_deep",
    "refuse_mismatch",
    "refuse_too_long",
]
