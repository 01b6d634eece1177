"""Checks documents of ``-o json`` against the schemas that ``sparsebp schema --all`` prints."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema

from sparsebp_cli.cli.answer.kind import BY_NAME, document_schema


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = document_schema(BY_NAME[kind])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read_document(text: str) -> dict[str, Any]:
    """Return the one document that a verb printed; fail if it is not alone, or not as its schema says."""
    document: dict[str, Any] = json.loads(text)
    validator(document["kind"]).validate(document)
    return document
