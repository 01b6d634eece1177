"""The kinds of documents with which commands answer: name, version, record, commands. A record is imported when needed.

A version increases when a field is removed or changes its meaning. New fields do not change it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from sparsebp_cli.cli.answer.record import Answer
from sparsebp_cli.cli.plugin import VerbEntry, find_verbs
from sparsebp_cli.entry_point import find_tool

DRAFT = "https://json-schema.org/draft/2020-12/schema"
HERE = "sparsebp_cli.cli.answer"


@dataclass(frozen=True)
class DocumentKind:
    """One kind of document."""

    name: str  # the document's ``kind``
    record: str  # module:class
    verbs: tuple[str, ...]  # commands that answer with it
    version: int | None = 1  # None: the record has its own field ``schema``
    described: tuple[str, ...] = ()  # additional modules of its classes, whose docstrings describe the fields

    def load(self) -> type[Any]:
        """Return the class of the record."""
        module, _, name = self.record.partition(":")
        found: type[Any] = getattr(import_module(module), name)
        return found


COMPARE = ("comparison", "measured", "margin", "statement", "statistics", "loaded")
KINDS: tuple[DocumentKind, ...] = (
    DocumentKind("error", f"{HERE}.record:ErrorAnswer", ()),
    DocumentKind("files", f"{HERE}.record:FileList", ("init", "new", "recipes")),
    DocumentKind("runs", f"{HERE}.run_record:RunList", ("runs",)),
    DocumentKind("outcomes", f"{HERE}.run_record:RunOutcomes", ("run", "resume", "rerun", "cancel", "quickstart")),
    DocumentKind("plans", f"{HERE}.run_record:RunPlans", ("run",)),
    DocumentKind("log", f"{HERE}.run_record:RunLog", ("logs",)),
    DocumentKind("labels", f"{HERE}.run_record:LabelList", ("tag",)),
    DocumentKind("archive", f"{HERE}.run_record:ArchiveFile", ("archive",)),
    DocumentKind("freed", f"{HERE}.run_record:FreedRuns", ("prune", "rm")),
    DocumentKind(
        "comparison",
        "sparsebp_cli.compare.comparison:Comparison",
        ("compare",),
        None,
        tuple(f"sparsebp_cli.compare.{name}" for name in COMPARE),
    ),
    DocumentKind("run", f"{HERE}.result_record:RunFacts", ("show",)),
    DocumentKind("sent", f"{HERE}.result_record:SentRuns", ("sync",)),
    DocumentKind("checked-recipes", f"{HERE}.recipe_record:CheckedRecipes", ("validate",)),
    DocumentKind("data", f"{HERE}.recipe_record:DataAnswer", ("data",)),
    DocumentKind("recipes", f"{HERE}.recipe_record:ShippedList", ("recipes",)),
    DocumentKind("policies", f"{HERE}.recipe_record:PolicyList", ("policies",)),
    DocumentKind("schemas", f"{HERE}.recipe_record:SchemaList", ("schema",)),
    DocumentKind("checks", f"{HERE}.machine_record:CheckReport", ("doctor", "targets")),
    DocumentKind("targets", f"{HERE}.machine_record:TargetList", ("targets",)),
)
FORECAST: VerbEntry | None = find_tool("forecast")
OF_PACKAGES: dict[str, DocumentKind] = {}
for verb, entry in [*find_verbs().items(), *([("validate", FORECAST)] if FORECAST is not None else [])]:
    for name, (record, version) in entry.answers.items():
        others = OF_PACKAGES[name].verbs if name in OF_PACKAGES else ()
        OF_PACKAGES[name] = DocumentKind(name, record, (*others, verb), version, entry.described)
KINDS += tuple(OF_PACKAGES.values())
BY_NAME = {kind.name: kind for kind in KINDS}


def find_kind(record: object) -> DocumentKind:
    """Return the kind of a record."""
    place = f"{type(record).__module__}:{type(record).__qualname__}"
    return next(kind for kind in KINDS if kind.record == place)


def make_document(record: object, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a record as plain values, with its kind and version. Add the warnings if it has none of its own."""
    kind = find_kind(record)
    content: dict[str, Any] = TypeAdapter[Any](type(record)).dump_python(record, mode="json", fallback=str)
    head = {"schema": content.pop("schema") if kind.version is None else kind.version, "kind": kind.name}
    if "warnings" not in content:
        content["warnings"] = list(warnings)
    return {**head, **content}


def document_schema(kind: DocumentKind) -> dict[str, Any]:
    """Return the JSON schema of a kind's documents."""
    record = kind.load()
    Answer.complete()
    made = TypeAdapter[Any](record).json_schema(mode="serialization")
    modules = tuple(import_module(name) for name in (kind.record.partition(":")[0], *kind.described))
    for name, definition in {record.__name__: made, **made.get("$defs", {})}.items():
        found = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        if found is not None:
            _describe(found, definition)
    about = {"description": "Version of this kind of document.", "type": "integer"}
    own = made["properties"].pop("schema", {})
    version = own.get("const", own.get("default")) if kind.version is None else kind.version
    properties = {"schema": {**about, "const": version}, "kind": {"const": kind.name}, **made["properties"]}
    if "warnings" not in properties:
        text = "Problems that did not prevent the answer, one line each."
        properties["warnings"] = {"description": text, "items": {"type": "string"}, "type": "array"}
    if kind.version is None:  # a file that the record's own package has written is valid too
        made |= {"properties": properties, "required": sorted({*made.get("required", ()), "schema"})}
    else:  # fields with a default are always written too
        made |= {"properties": properties, "required": list(properties)}
    return {"$schema": DRAFT} | made | {"title": f"sparsebp: {kind.name}"}


def _describe(found: type, definition: dict[str, Any]) -> None:
    """Add the descriptions of a class and its fields, from its docstring, to its schema."""
    text = inspect.getdoc(found) or ""
    definition["description"] = text.partition("\n\n")[0].replace("\n", " ")
    arguments = text.partition("Args:\n")[2]
    for field, description in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE):
        if field in definition.get("properties", {}):
            plain = re.sub(r":class:`(\w+)`", r"\1", re.sub(r"\s+", " ", description)).replace("``", "")
            definition["properties"][field]["description"] = plain
