"""Time every form of a policy against dense for ``sparsebp bench``. The modules ``variant``, ``subject`` and ``row``
need only torch and support CUDA; ``benchmarks/gpu.py`` uses them too."""

from sparsebp_tools.bench.form import BenchForm, find_forms
from sparsebp_tools.bench.request import Request
from sparsebp_tools.bench.result import Benchmark, BenchmarkRow, BreakEven, RoundQuartiles, find_break_even

__all__ = [
    "BenchForm",
    "Benchmark",
    "BenchmarkRow",
    "BreakEven",
    "Request",
    "RoundQuartiles",
    "find_break_even",
    "find_forms",
]
