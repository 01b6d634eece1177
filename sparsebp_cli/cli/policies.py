"""``sparsebp policies``: what can be put under ``policy:`` in a recipe."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, console, make_table, print_json, print_line

if TYPE_CHECKING:
    from sparsebp_cli.policy import FoundPolicy


def policies(output: Format = Output.TABLE) -> None:
    """List the installed policies; a broken plugin is shown with its problem."""
    from sparsebp_cli.policy import find_policies

    described = [describe_policy(found) for found in find_policies().values()]
    if output is Output.JSON:
        print_json(described)
        return
    from rich.text import Text

    table = make_table("name", "kind", "options", "exact", "unbiased", "source")
    for line in described:
        options = "\n".join(f"{option['name']}: {option['allowed']}" for option in line["options"]) or "none"
        claims = ["by options" if line[c] is None else "yes" if line[c] else "no" for c in ("exact", "unbiased")]
        cells = [line["name"], line["kind"], options, *claims, line["source"]]
        if line["problem"]:
            cells[2:5] = ["", "", ""]
        table.add_row(*(Text(cell) for cell in cells), style="red" if line["problem"] else None)
    console().print(table)
    for line in described:
        if line["problem"]:
            print_line(f"{line['name']} of {line['source']} is broken: {line['problem']}")


def describe_policy(found: FoundPolicy) -> dict[str, Any]:
    """Return what a recipe's author needs to know of a policy.

    Args:
        found: The policy.

    Returns:
        Plain values; ``exact`` and ``unbiased`` are None where they depend on options that have no default.
    """
    line: dict[str, Any] = {"name": found.name, "kind": found.kind, "source": found.source, "problem": found.problem}
    line |= {"summary": "", "options": [], "exact": None, "unbiased": None}
    if found.policy_class is None:
        return line
    schema = found.policy_class.model_json_schema()
    required = set(schema.get("required", ()))
    line["summary"] = (found.policy_class.__doc__ or "").strip().partition("\n")[0]
    line["options"] = [
        {
            "name": name,
            "allowed": _describe_range(option) + ("" if name in required else f" = {option.get('default')}"),
            "required": name in required,
            "default": option.get("default"),
            "description": option.get("description", ""),
        }
        for name, option in schema.get("properties", {}).items()
    ]
    if not required:
        policy = found.policy_class()
        line |= {"exact": policy.exact, "unbiased": policy.unbiased}
    return line


def _describe_range(option: dict[str, Any]) -> str:
    if "anyOf" in option:
        return " | ".join(_describe_range(choice) for choice in option["anyOf"])
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    if "const" in option:
        return str(option["const"])
    low = f"({option['exclusiveMinimum']:g}" if "exclusiveMinimum" in option else f"[{option.get('minimum', -inf):g}"
    high = f"{option['exclusiveMaximum']:g})" if "exclusiveMaximum" in option else f"{option.get('maximum', inf):g}]"
    kind = str(option.get("type", "any"))
    interval = f" in {low}, {high}".replace("[-inf", "(-inf").replace("inf]", "inf)")
    return kind if kind not in {"number", "integer"} or (low, high) == ("[-inf", "inf]") else kind + interval
