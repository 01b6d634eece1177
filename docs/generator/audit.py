"""The JSON schema of ``sparsebp audit -o json``."""

from __future__ import annotations

from pathlib import Path

from generator.document import one_schema


def schema(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the schema."""
    return one_schema("audit")
