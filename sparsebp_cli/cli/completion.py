"""Complete words in the shell: runs, recipes, keys of recipes and their values, metrics, policies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebp_cli.run import home, list_runs
from sparsebp_cli.run.label import Labels

MOST_COMPLETIONS = 50


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """Return the runs whose id or name begins with the typed text, each with a help text."""
    words = {"@last": "the newest run"}
    for run in list_runs()[:MOST_COMPLETIONS]:
        name = run.brief()[0]
        words |= {run.run_id: name, name: "every run of this name"}
        words |= {f"@{tag}": "every run with this tag" for tag in Labels.load(run.path).tags}
    return [(word, text) for word, text in words.items() if word.startswith(incomplete)]


def complete_study(incomplete: str) -> list[str]:
    """Return the studies of this machine whose names begin with the typed text."""
    names = sorted(file.stem for file in (home() / "studies").glob("*.json"))
    return [name for name in names if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str] | list[tuple[str, str]]:
    """Return the recipe files and folders that begin with the typed text; folders end in a slash. If there are none,
    return names of shipped recipes."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    start = "" if incomplete.endswith("/") else Path(incomplete).name
    try:
        files = sorted(path for path in folder.iterdir() if path.name.startswith(start))
    except OSError:
        files = []
    found = [f"{path}/" if path.is_dir() else str(path) for path in files if not path.name.startswith(".")]
    files_here = [path for path in found if path.endswith(("/", ".yaml", ".yml"))]
    return files_here or complete_shipped(incomplete)


def complete_shipped(incomplete: str) -> list[tuple[str, str]]:
    """Return names of shipped recipes that begin with the typed text, with or without folder, and a help text each."""
    from sparsebp_cli.cli.starter import list_shipped

    found = [(name, one.summary) for one in list_shipped() for name in dict.fromkeys((one.short_name, one.name))]
    return [(name, summary) for name, summary in found if name.startswith(incomplete)]


def complete_metric(incomplete: str) -> list[tuple[str, str]]:
    """Return the metrics that begin with the typed text, each with its unit."""
    from sparsebp_cli.run.metric import METRICS

    return [(name, known.unit) for name, known in METRICS.items() if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    """Return the installed policies that begin with the typed text, each with its kind."""
    from sparsebp_cli.policy.discovery import find_policies

    return [(name, found.kind) for name, found in find_policies().items() if name.startswith(incomplete)]


def complete_change(incomplete: str) -> list[str]:
    """Return the recipe keys that begin with the typed text, or after ``KEY=`` the possible values of the key. Options
    of the first policy are keys too."""
    from sparsebp_cli.policy.discovery import find_policies
    from sparsebp_cli.recipe import Recipe

    policies = find_policies()
    keys = dict(_walk(Recipe.model_json_schema()))
    for found in policies.values():
        if found.policy_class is not None:
            for name, option in found.policy_class.model_json_schema().get("properties", {}).items():
                keys[f"policy.0.{name}"] = option
    names = [{"const": name} for name in policies]
    keys |= {"policy": {"anyOf": names}, "policy.0.name": {"anyOf": names}}
    key, is_value, _ = incomplete.partition("=")
    if is_value:
        return [word for value in _values(keys.get(key, {})) if (word := f"{key}={value}").startswith(incomplete)]
    mark = "~" if incomplete.startswith("~") else ""
    words = (f"{mark}{name}" + ("" if mark else "=") for name in sorted(keys))
    return [word for word in words if word.startswith(incomplete)]


Schema = dict[str, Any]


def _walk(schema: Schema, prefix: str = "", sections: Schema | None = None) -> Iterator[tuple[str, Schema]]:
    """Yield every key below a JSON schema with its schema. Enter sections."""
    sections = schema.get("$defs", {}) if sections is None else sections
    for name, option in schema.get("properties", {}).items():
        choices = [option, *option.get("anyOf", ()), *option.get("allOf", ())]
        inner = [sections[one["$ref"].rpartition("/")[2]] for one in choices if "$ref" in one]
        if not inner:
            yield f"{prefix}{name}", option
        for section in inner:
            yield from _walk(section, f"{prefix}{name}.", sections)


def _values(option: dict[str, Any]) -> list[str]:
    if "anyOf" in option:
        return [value for choice in option["anyOf"] for value in _values(choice)]
    if option.get("type") == "boolean":
        return ["true", "false"]
    if option.get("type") == "null":
        return ["null"]
    return [str(value) for value in option.get("enum", [option["const"]] if "const" in option else [])]
