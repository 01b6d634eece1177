"""What ``sparsebp bench`` asks for and what it finds: forms of a policy, request, result, break-even, picture."""

from sparsebp_cli.bench.break_even import BreakEven, find_break_even
from sparsebp_cli.bench.form import Form, find_forms
from sparsebp_cli.bench.request import Request
from sparsebp_cli.bench.result import Benchmark, Quartiles, Row

__all__ = ["Benchmark", "BreakEven", "Form", "Quartiles", "Request", "Row", "find_break_even", "find_forms"]
