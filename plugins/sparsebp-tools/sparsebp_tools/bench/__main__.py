"""Run ``python -m sparsebp_tools.bench``: read a request from standard input, write lines of JSON to standard output,
as in :mod:`sparsebp_cli.worker.answer`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sparsebp_cli.worker import wait_briefly

wait_briefly()


def measure_request(line: str, report: Callable[[str, int, int], None]) -> dict[str, object]:
    """Measure a benchmark request."""
    from sparsebp_tools.bench import Request

    request = Request.model_validate_json(line)
    from sparsebp_tools.bench.measure import measure

    return measure(request, report).model_dump(mode="json")


if __name__ == "__main__":
    from sparsebp_cli.worker.answer import converse

    sys.exit(converse(measure_request))
