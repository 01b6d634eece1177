"""Several runs side by side: what they differ in, how good, how fast, how large, and what may be concluded."""

from sparsebp_cli.compare.build import compare_runs
from sparsebp_cli.compare.comparison import Comparison, Group, RunLine
from sparsebp_cli.compare.picture import picture
from sparsebp_cli.compare.render import FORMATS, render
from sparsebp_cli.compare.table import table

__all__ = ["FORMATS", "Comparison", "Group", "RunLine", "compare_runs", "picture", "render", "table"]
