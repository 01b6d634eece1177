"""``sparsebp policies``: list the policies that a recipe can name under ``policy:``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.recipe_record import PolicyLine, PolicyList, PolicyOption
from sparsebp_cli.cli.completion import complete_policy
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, console, make_table, print_line

if TYPE_CHECKING:
    from sparsebp_cli.policy import FoundPolicy, Policy

CARD_WORDS = {
    "use": "when",
    "year": "published",
    "saves": "saves",
    "work": "FLOPs of its linear layers (dense: 1)",
    "memory": "saved for the backward",
    "claimed": "the publication claims",
    "measured": "measured here",
    "code": "official code",
}


def policies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Describe this policy and its options.",
            show_default=False,
            autocompletion=complete_policy,
        ),
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """List the installed policies, or describe one with its options. Broken plug-ins are listed with their error."""
    from sparsebp_cli.policy.discovery import find_policies, find_policy

    found = [find_policy(name)] if name is not None else list(find_policies().values())
    described = [describe_policy(policy) for policy in found]
    tell(PolicyList(policies=described), output, _print_all if name is None else _print_one)


def _print_all(found: PolicyList) -> None:
    from rich.text import Text

    table = make_table("name", "kind", "exact", "unbiased", "saves", "year", "source")
    for line in found.policies:
        card = line.card or {}
        claims = [word.replace("by options", "varies") for word in _word_claims(line)]
        source = line.source.split()[0]  # `policies NAME` shows the version
        cells = [
            line.name,
            line.kind,
            *claims,
            ", ".join(card.get("saves", ())),
            str(card.get("year") or ""),
            source,
        ]
        if line.problem:
            cells[2:4] = ["", ""]
        table.add_row(*(Text(cell) for cell in cells), style="red" if line.problem else None)
    console().print(table)
    for line in found.policies:
        if line.problem:
            print_line(f"{line.name} of {line.source} is broken: {line.problem}")
    print_line("varies: depends on an option; `sparsebp policies NAME` shows the options")


def _print_one(found: PolicyList) -> None:
    from rich.text import Text

    (line,) = found.policies
    exact, unbiased = _word_claims(line)
    print_line(f"{line.name} ({line.kind}, {line.source}): {line.summary}")
    print_line(f"exact: {exact}; unbiased: {unbiased}")
    for key, word in CARD_WORDS.items():
        if value := (line.card or {}).get(key):
            console().print(Text(f"{word}: {', '.join(value) if key == 'saves' else value}"))
    table = make_table("option", "allowed", "default", "meaning")
    for option in sorted(line.options, key=lambda option: option.common):
        default = option.default if isinstance(option.default, str) else json.dumps(option.default)
        default = "required" if option.required else default
        table.add_row(*(Text(cell) for cell in (option.name, option.range, default, option.description)))
    console().print(table)


def _word_claims(line: PolicyLine) -> list[str]:
    return ["by options" if claim is None else "yes" if claim else "no" for claim in (line.exact, line.unbiased)]


def describe_policy(found: FoundPolicy) -> PolicyLine:
    """Return a policy's properties for the author of a recipe. ``exact`` and ``unbiased`` are None if they depend on
    options that are not numbers."""
    from sparsebp_cli.policy import EdgeRouter, GradientSelector, TokenSelector

    line: dict[str, Any] = {"name": found.name, "kind": found.kind, "source": found.source, "problem": found.problem}
    if found.policy_class is None:
        return PolicyLine(**line)
    line["card"] = None if found.policy_class.card is None else asdict(found.policy_class.card)
    schema = found.policy_class.model_json_schema()
    required = set(schema.get("required", ()))
    kinds = [kind for kind in (GradientSelector, EdgeRouter, TokenSelector) if issubclass(found.policy_class, kind)]
    common = {key for kind in kinds for key in kind.model_fields}
    line["summary"] = (found.policy_class.__doc__ or "").strip().partition("\n")[0]
    line["options"] = [
        PolicyOption(
            name=name,
            allowed=_describe_range(option) + ("" if name in required else f" = {option.get('default')}"),
            range=_describe_range(option),
            required=name in required,
            common=name in common,
            default=option.get("default"),
            description=option.get("description", ""),
        )
        for name, option in schema.get("properties", {}).items()
    ]
    forms = list(_make_forms(found.policy_class, schema.get("properties", {}), required))
    for claim in ("exact", "unbiased"):
        values = {bool(getattr(form, claim)) for form in forms}
        line[claim] = values.pop() if len(values) == 1 else None
    return PolicyLine(**line)


def _make_forms(policy_class: type[Policy], options: dict[str, Any], required: set[str]) -> Iterator[Policy]:
    """Yield the policy with its defaults, and with each other value of each option that has few values. A number
    without a default is set to 0.5. Forms that the policy refuses are left out."""
    from pydantic import ValidationError

    values = {name: _list_values(option) for name, option in options.items()}
    needed = {name: values[name] or [0.5] for name in sorted(required)}
    for base in (dict(zip(needed, each, strict=True)) for each in product(*needed.values())):
        changes = [{name: value} for name, each in values.items() if name not in required for value in each]
        for change in ({}, *changes):
            with suppress(ValidationError):
                yield policy_class.model_validate(base | change)


def _list_values(option: dict[str, Any]) -> list[object]:
    """Return the words, or the booleans, that an option allows; empty for numbers and texts."""
    if "anyOf" in option:
        return [value for choice in option["anyOf"] for value in _list_values(choice)]
    if option.get("type") == "boolean":
        return [True, False]
    return [value for value in option.get("enum", [option.get("const")]) if isinstance(value, str)]


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
