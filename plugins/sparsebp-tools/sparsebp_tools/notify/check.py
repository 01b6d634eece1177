"""Check the settings for ``sparsebp doctor``."""

from __future__ import annotations

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.target import CheckResult
from sparsebp_tools.notify.settings import load_settings


def check() -> list[CheckResult]:
    """Check whether the settings for notifications are valid, without sending any; empty without such settings."""
    try:
        notices = load_settings().notify
    except SparseBPError as error:
        return [CheckResult("warn", "notify", str(error), "no notification is sent until you correct this")]
    programs = ", ".join(notice.command[0] for notice in notices)
    return [CheckResult("ok", "notify", f"{programs}; nothing was sent")] if notices else []
