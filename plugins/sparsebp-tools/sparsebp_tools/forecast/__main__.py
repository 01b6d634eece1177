"""``python -m sparsebp_tools.forecast``: a request on standard input, lines of JSON on standard output, as in
:mod:`sparsebp_cli.worker.answer`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from sparsebp_cli.worker import wait_briefly

wait_briefly()


def answer_request(line: str, report: Callable[[str, int, int], None]) -> dict[str, object]:
    """Forecast what a plan takes."""
    from sparsebp_tools.forecast.record import ForecastRequest

    request = ForecastRequest.model_validate_json(line)
    from sparsebp_tools.forecast.measure import forecast

    return forecast(request, report).model_dump(mode="json")


if __name__ == "__main__":
    from sparsebp_cli.worker.answer import converse

    sys.exit(converse(answer_request))
