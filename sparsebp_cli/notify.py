"""Report ends of runs to ``notify`` of ``plugins/sparsebp-tools``, which informs recipients in ``settings.yaml``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsebp_cli.entry_point import find_tool
from sparsebp_cli.run import RunFolder


def tell(event: str, facts: dict[str, Any]) -> None:
    """Report an event such as ``judged`` to the recipients in the settings. ``facts`` are plain JSON values without
    secrets. Return at once, and raise nothing."""
    _call("tell", event, facts)


def tell_end(run: RunFolder, exit_code: int | None, *, is_asked: bool) -> None:
    """Report how a run ended. ``exit_code`` is its worker's, None if unknown; ``is_asked``: a user requested it."""
    _call("tell_end", run, exit_code, is_asked=is_asked)


def _call(name: str, *args: object, **options: object) -> None:
    with suppress(Exception):  # the run continues after any error
        if settings_file().exists() and (tool := find_tool("notify")) is not None:
            getattr(tool, name)(*args, **options)


def settings_file() -> Path:
    """Return the settings file: ``$SPARSEBP_SETTINGS``, else ``settings.yaml`` in the user's config folder."""
    if chosen := os.environ.get("SPARSEBP_SETTINGS"):
        return Path(chosen).expanduser()
    from platformdirs import user_config_path

    return user_config_path("sparsebp", appauthor=False) / "settings.yaml"
