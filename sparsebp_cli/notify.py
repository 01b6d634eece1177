"""Ends of runs, of which the tool ``notify`` of ``plugins/sparsebp-tools`` tells whoever ``settings.yaml`` names."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsebp_cli.entry_point import find_tool
from sparsebp_cli.run import RunFolder


def tell(event: str, facts: dict[str, Any]) -> None:
    """Tell whoever the settings name of an event, such as ``judged``, with plain values for JSON; return at once, and
    raise nothing. Secrets have no place in them."""
    _call("tell", event, facts)


def tell_end(run: RunFolder, exit_code: int | None, *, is_asked: bool) -> None:
    """Tell how a run ended, by the exit code of its worker if it is known; ``is_asked``: by a user's wish."""
    _call("tell_end", run, exit_code, is_asked=is_asked)


def _call(name: str, *args: object, **options: object) -> None:
    with suppress(Exception):  # whatever it is, the run goes on
        if settings_file().exists() and (tool := find_tool("notify")) is not None:
            getattr(tool, name)(*args, **options)


def settings_file() -> Path:
    """Return the file of settings: ``$SPARSEBP_SETTINGS``, else ``settings.yaml`` in the user's config folder."""
    if chosen := os.environ.get("SPARSEBP_SETTINGS"):
        return Path(chosen).expanduser()
    from platformdirs import user_config_path

    return user_config_path("sparsebp", appauthor=False) / "settings.yaml"
