"""The check of the settings for ``sparsebp doctor``."""

from __future__ import annotations

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.target import CheckResult
from sparsebp_tools.notify.settings import Secret, load_settings


def check() -> list[CheckResult]:
    """Whether the settings say in a usable way who is told of what; nothing is sent. Nothing without such settings."""
    try:
        notices = load_settings().notify
        for secret in (each for notice in notices for each in (notice.webhook, notice.secret)):
            if isinstance(secret, Secret):
                secret.read()
    except SparseBPError as error:
        return [CheckResult("warn", "notify", str(error), "nothing is sent until it is corrected")]
    ways = ["command" if notice.command is not None else "webhook" for notice in notices]
    return [CheckResult("ok", "notify", f"{', '.join(ways)}; nothing was sent")] if ways else []
