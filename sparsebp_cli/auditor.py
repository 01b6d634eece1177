"""Forwards ``audit`` and ``Audit`` of 0.5 to the package ``sparsebp-audit``. The next release has no such module."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

HOME = "sparsebp_audit"


def __getattr__(name: str) -> Any:
    """Return a name of 0.5 from the package that has it now, with a warning."""
    if name not in {"Audit", "audit"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(HOME), name)
    except ModuleNotFoundError as error:
        if error.name != HOME:
            raise
        text = f"{name} is in the package sparsebp-audit: python -m pip install sparsebp-audit"
        raise ModuleNotFoundError(text, name=HOME) from None
    # Not a DeprecationWarning, which Python hides where sparsebp_cli itself calls this, for `sparsebp_cli.audit`.
    warnings.warn(f"{name} has moved: import it from {HOME}", FutureWarning, stacklevel=2)
    return found
