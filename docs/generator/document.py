"""The documents of ``-o json``: a page with their kinds, and their JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path

from generator.markdown import code, head, table
from sparsebp_cli.cli.answer.kind import BY_NAME, DRAFT, KINDS, document_schema

TEXT = """Every verb with `-o json` prints one JSON document to standard output. Its `kind` is in this table, its
`schema` the version of that kind: it goes up when a field is removed or changes its meaning, and new fields leave it as
it is. `warnings` lists problems that did not prevent the answer.
[Use SparseBP from programs](../guide/tracking.md#use-sparsebp-from-programs) shows how to use them;
`sparsebp schema --all` prints the schemas, and [documents.schema.json](../documents.schema.json) has them by kind."""


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    rows = []
    for kind in KINDS:
        made = document_schema(kind)
        verbs = ", ".join(code(verb) for verb in kind.verbs) or "every verb"
        rows.append((code(kind.name), str(made["properties"]["schema"]["const"]), verbs, made.get("description", "")))
    return "\n".join([head("Documents", TEXT), table(("kind", "version", "verbs", "what it has"), rows)]) + "\n"


def one_schema(name: str) -> str:
    """Return the JSON schema of one kind."""
    return json.dumps(document_schema(BY_NAME[name]), indent=1) + "\n"


def schemas(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the JSON schemas of all kinds."""
    documents = {kind.name: document_schema(kind) for kind in KINDS}
    return json.dumps({"$schema": DRAFT, "title": "sparsebp -o json", "$defs": documents}, indent=1) + "\n"
