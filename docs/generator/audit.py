"""The JSON schema of ``sparsebp audit -o json``, from the dataclasses that are written and their docstrings."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from generator.comparison import DRAFT, describe
from sparsebp_cli.audit_report import SCHEMA, AuditReport, applied, isolation, report


def schema(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the schema."""
    made = TypeAdapter(AuditReport).json_schema(mode="serialization")
    for name, definition in {"AuditReport": made, **made["$defs"]}.items():
        describe(name, definition, (report, applied, isolation))
    made["properties"]["schema"]["const"] = SCHEMA
    return json.dumps({"$schema": DRAFT} | made | {"title": "sparsebp audit -o json"}, indent=1) + "\n"
