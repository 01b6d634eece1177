"""The page of public names: of the package, and of every room whose docstring begins with PUBLIC, what it exports."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import sparsebp_audit
import sparsebp_cli
import sparsebp_tools.memory
from generator.markdown import code, head, table, unwrap

TEXT = """This page lists every name that a script, a plugin or a test outside of SparseBP may import. A room is public
if its docstring begins with the word, and its public names are those in its `__all__`. [Stability](stability.md) says
what a release may change of them, and [Python interface](api.md) has their arguments."""

MARK = "PUBLIC. "
ALIASES = {  # names of types and values, which have no docstring of their own
    "sparsebp_cli.__version__": "The version.",
    "sparsebp_cli.policy.Observed": "The name of something that a stateful policy may ask to see.",
    "sparsebp_cli.policy.PolicyLike": "A policy, its name, or a mapping of its name and options.",
    "sparsebp_cli.policy.Reading": "The name of something that an informed selector may ask to see.",
    "sparsebp_cli.policy.Score": "The name of a score of positions that the engine computes.",
    "sparsebp_cli.policy.State": "State of a policy: names to tensors or numbers.",
}


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    parts = [head("Public names", TEXT)]
    for module, names in find_public().items():
        found = import_module(module)
        parts += [f"## `{module}`\n", f"{_first_sentence(found)}\n"]
        parts.append(table(("name", "meaning"), [(code(name), _explain(found, name)) for name in names]))
    return "\n".join(parts)


def find_public() -> dict[str, list[str]]:
    """Return the names that each public module exports, the package itself first."""
    packages = (sparsebp_cli, sparsebp_audit, sparsebp_tools.memory)
    found = {package.__name__: list(package.__all__) for package in packages}
    for entry in pkgutil.iter_modules(sparsebp_cli.__path__, f"{sparsebp_cli.__name__}."):
        module = import_module(entry.name)
        if (module.__doc__ or "").startswith(MARK):
            found[entry.name] = list(module.__all__)
    return found


def _explain(module: ModuleType, name: str) -> str:
    full = f"{module.__name__}.{name}"
    if full in ALIASES:
        return ALIASES[full]
    return _first_sentence(getattr(module, name))


def _first_sentence(found: object) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", unwrap(inspect.getdoc(found)))
    text = text.removeprefix(MARK).partition("\n\n")[0]
    sentence = " ".join(text.split()).partition(". ")[0].rstrip(".:")
    return f"{sentence}."
