"""Compare runs: differences of their recipes, quality, speed, memory, and the statements that the numbers support."""

from sparsebp_cli.compare.build import compare_runs
from sparsebp_cli.compare.choose import (
    RunCandidate,
    choose,
    describe_left_out,
    find_outcomes,
    load_all,
    local_candidates,
)
from sparsebp_cli.compare.comparison import ComparedRun, Comparison, Group
from sparsebp_cli.compare.gate import check
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.margin import parse_margin
from sparsebp_cli.compare.question import Question
from sparsebp_cli.compare.render import FORMATS, answer, render, table
from sparsebp_cli.compare.report import REPORT_CURVES, write_report

__all__ = [
    "FORMATS",
    "REPORT_CURVES",
    "ComparedRun",
    "Comparison",
    "Group",
    "LoadedRun",
    "Question",
    "RunCandidate",
    "answer",
    "check",
    "choose",
    "compare_runs",
    "describe_left_out",
    "find_outcomes",
    "load_all",
    "local_candidates",
    "parse_margin",
    "render",
    "table",
    "write_report",
]
