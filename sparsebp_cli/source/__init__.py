"""Models and data that a recipe names: resolve names, read files, and check them without torch or network."""

from sparsebp_cli.source.inspection import SourceProblem, inspect_sources, needs_tokens
from sparsebp_cli.source.model import read_config, refuse_mismatch, refuse_too_long
from sparsebp_cli.source.name import DATASETS, MODELS, find_path, find_source

__all__ = [
    "DATASETS",
    "MODELS",
    "SourceProblem",
    "find_path",
    "find_source",
    "inspect_sources",
    "needs_tokens",
    "read_config",
    "refuse_mismatch",
    "refuse_too_long",
]
