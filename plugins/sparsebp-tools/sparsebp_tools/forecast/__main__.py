"""Run ``python -m sparsebp_tools.forecast``: read a request from standard input, write lines of JSON to standard
output, as in :mod:`sparsebp_cli.worker.answer`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sparsebp_cli.worker import wait_briefly

wait_briefly()


def answer_request(line: str, report: Callable[[str, int, int], None]) -> dict[str, object]:
    """Return the forecast of a plan."""
    from sparsebp_tools.forecast.record import ForecastRequest

    request = ForecastRequest.model_validate_json(line)
    from sparsebp_tools.forecast.measure import forecast

    return forecast(request, report).model_dump(mode="json")


if __name__ == "__main__":
    from sparsebp_cli.worker.answer import converse

    sys.exit(converse(answer_request))
