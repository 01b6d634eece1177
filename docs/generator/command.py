"""The command line's reference, from the signatures of its verbs, independent of a terminal's width."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

from generator.markdown import code, head, table, unwrap
from sparsebp_cli.cli.app import VERBS, _main
from sparsebp_cli.cli.verb_help import EXAMPLES

TEXT = """This page lists every verb with its arguments and options. `sparsebp VERB --help` prints the same in a
terminal; every verb has `-h`. Exit codes: [errors and exit codes](errors.md).

Name a run by its id, the beginning of its id (three characters at least), its recipe's name, `@last`, or `@N` for the
newest N. `sparsebp --install-completion` makes the shell complete verbs, options, recipes and runs."""


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    parts = [head("Command line", TEXT), "## Every verb\n", _parameters(_main)]
    for panel, verbs in VERBS.items():
        parts.append(f"## {panel}\n")
        parts += [_verb(verb) for verb in verbs]
    return "\n".join(parts).rstrip("\n") + "\n"


def _verb(verb: Callable[..., None]) -> str:
    name = verb.__name__
    words = [_argument(*parts) for parts in _signature(verb) if _is_argument(parts[1])]
    usage = " ".join(["sparsebp", name, "[OPTIONS]", *words])
    return "\n".join(
        [
            f"### {name}\n",
            unwrap(verb.__doc__),
            "",
            "```text",
            usage,
            f"sparsebp {EXAMPLES[name]}",
            "```",
            "",
            _parameters(verb),
        ]
    )


def _argument(name: str, info: Any, annotation: Any, default: Any) -> str:
    """Return an argument as the usage line has it: in brackets if it may be left out, with dots if it repeats."""
    word = (info.metavar or name.upper()).removesuffix("...")
    word = word if default is inspect.Parameter.empty else f"[{word}]"
    kinds = (annotation, *get_args(annotation))
    return f"{word}..." if any(get_origin(kind) is list for kind in kinds) else word


def _parameters(verb: Callable[..., None]) -> str:
    rows = []
    for name, info, annotation, default in _signature(verb):
        if _is_argument(info):
            spelled, shown = code(info.metavar or name.upper()), _of_argument(info, default)
        else:
            spelled = ", ".join(code(flag) for flag in _flags(name, info))
            shown = info.show_default if isinstance(info.show_default, str) else _default(default)
        rows.append((spelled, _allowed(info, annotation), shown, info.help or ""))
    return table(("argument or option", "value", "default", "meaning"), rows) if rows else ""


def _signature(verb: Callable[..., None]) -> Iterator[tuple[str, Any, Any, Any]]:
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        if get_args(parameter.annotation):  # skips typer.Context, which is no option
            annotation, info = get_args(parameter.annotation)
            yield name, info, annotation, parameter.default


def _is_argument(info: ArgumentInfo | OptionInfo) -> bool:
    return isinstance(info, ArgumentInfo)


def _flags(name: str, info: OptionInfo) -> list[str]:
    given = [info.default, *(info.param_decls or ())]
    flags = [flag for flag in given if isinstance(flag, str) and flag.startswith("-")]
    return sorted(flags, key=len) or [f"--{name.replace('_', '-')}"]


def _of_argument(info: ArgumentInfo, default: Any) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    return "" if default is inspect.Parameter.empty else "none" if default is None else code(default)


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is False:
        return ""
    return code(default.value if isinstance(default, Enum) else default)


def _allowed(info: ArgumentInfo | OptionInfo, annotation: Any) -> str:
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not NoneType]
    kind = kinds[0] if kinds else annotation
    kind = get_args(kind)[0] if get_args(kind) else kind
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return " or ".join(code(choice.value) for choice in kind)
    if kind is bool:
        return ""
    low, high = info.min, info.max
    bounds = f", {low:g} to {high:g}" if None not in (low, high) else f", at least {low:g}" if low is not None else ""
    words = {"str": "text", "int": "whole number", "float": "number", "Path": "path"}
    value = info.metavar if not _is_argument(info) and info.metavar else words[kind.__name__]
    return f"{value}{bounds}"
