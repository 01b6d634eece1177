"""What is known of a run from its folder, read without the schema: old runs and foreign options stay readable."""

from __future__ import annotations

import json
from typing import Any

from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.run import RunFolder, find_run


def read_plan(run: RunFolder) -> dict[str, Any]:
    """Return a run's plan as it is stored.

    Args:
        run: The run.

    Returns:
        The content of ``plan.json``.

    Raises:
        RunNotFoundError: There is none, or it is damaged.
    """
    try:
        plan = json.loads(run.plan_file.read_bytes())
        plan["recipe"]["training"]["max_steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunNotFoundError(f"run {run.run_id}: {run.plan_file} is not a plan: {error}") from None
    return dict(plan)


def read_recipe(run: RunFolder) -> dict[str, Any]:
    """Return a run's resolved recipe."""
    return dict(read_plan(run)["recipe"])


def describe_policies(recipe: dict[str, Any]) -> str:
    """Return policies and their options in one line: ``topk along=rows keep=0.1``."""
    entries = []
    for entry in recipe["policy"]:
        options = [f"{key}={value}" for key, value in entry.items() if key != "name" and value is not None]
        entries.append(" ".join([entry["name"], *options]))
    return ", ".join(entries)


def find_one(word: str) -> RunFolder:
    """Return the one run that a word names.

    Args:
        word: See ``run.find_run``; a name with several runs means the newest.

    Returns:
        The run.
    """
    return find_run(word)[-1]


def find_all(words: list[str]) -> list[RunFolder]:
    """Return every run that one of the words names, each once, in the order of the words."""
    return list({run.run_id: run for word in words for run in find_run(word)}.values())
