"""The data of ``sparsebp bench``: forms of a policy, request, result, break-even, picture."""

from sparsebp_cli.bench.form import Form, find_forms
from sparsebp_cli.bench.request import Request
from sparsebp_cli.bench.result import Benchmark, BenchmarkRow, BreakEven, RoundQuartiles, find_break_even

__all__ = [
    "Benchmark",
    "BenchmarkRow",
    "BreakEven",
    "Form",
    "Request",
    "RoundQuartiles",
    "find_break_even",
    "find_forms",
]
