"""The JSON schema of ``sparsebp compare -o json``, from the dataclasses that are written and their docstrings."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from sparsebp_cli.compare import Comparison, comparison, loaded, margin, measured, published, statement, statistics
from sparsebp_cli.run import memory

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the schema."""
    made = TypeAdapter(Comparison).json_schema(mode="serialization")
    for name, definition in {"Comparison": made, **made["$defs"]}.items():
        describe(name, definition, (comparison, measured, margin, published, statement, statistics, loaded, memory))
    return json.dumps({"$schema": DRAFT} | made | {"title": "sparsebp compare -o json"}, indent=1) + "\n"


def describe(name: str, definition: dict[str, Any], modules: tuple[ModuleType, ...]) -> None:
    """Add the descriptions of a class and its fields, from its docstring, to its schema; one of the modules has the
    class.
    """
    found = next(getattr(module, name) for module in modules if hasattr(module, name))
    text = inspect.getdoc(found) or ""
    definition["description"] = text.partition("\n\n")[0].replace("\n", " ")
    arguments = text.partition("Args:\n")[2]
    for field, description in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE):
        if field in definition.get("properties", {}):
            plain = re.sub(r":class:`(\w+)`", r"\1", re.sub(r"\s+", " ", description)).replace("``", "")
            definition["properties"][field]["description"] = plain
