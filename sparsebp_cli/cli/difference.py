"""``sparsebp diff``: what differs between two runs: recipe, code, data, environment, results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.result_record import Difference, Differences
from sparsebp_cli.cli.option import Format, OneRun
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.cli.stored_run import find_one
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import History, RunFolder, metric

LAST = (
    *(metric.EVAL_LOSS, metric.EVAL_ACCURACY, metric.EVAL_MACRO_F1, metric.EVAL_MCC, metric.EVAL_F1),
    *(metric.EVAL_PEARSON, metric.EVAL_SPEARMAN),
    *(metric.TEST_LOSS, metric.TEST_ACCURACY, metric.TEST_MACRO_F1, metric.TEST_MCC, metric.TEST_F1),
    *(metric.TEST_PEARSON, metric.TEST_SPEARMAN),
)
MEDIAN = (metric.STEP_SECONDS, metric.SPEEDUP, metric.PEAK_ALLOCATED_BYTES, metric.PEAK_RESIDENT_BYTES)
LONGEST = 200  # of a value in the table; JSON has all of it
ABSENT = "-"


def diff(first: OneRun, second: OneRun, output: Format = Output.TABLE) -> None:
    """Show what differs between two runs: resolved recipe, code and data digests, environment, results."""
    runs = (find_one(first), find_one(second))
    if runs[0] == runs[1]:
        raise UsageError(f"diff compares two runs, and both names mean {runs[0].run_id}")
    found = find_differences(*runs)
    tell(Differences(runs=(runs[0].run_id, runs[1].run_id), differences=found), output, _print)


def _print(found: Differences) -> None:
    if not found.differences:
        print_line("nothing differs: recipe, code, data, environment and results are the same")
        return
    from rich.text import Text

    table = make_table("", "what", *found.runs)
    section = ""
    for change in found.differences:
        head = "" if change.section == section else change.section
        section = change.section
        table.add_row(head, change.key, *(Text(_show(value)) for value in change.values))
    console().print(table)


def find_differences(first: RunFolder, second: RunFolder) -> list[Difference]:
    """Return what differs between two runs, in the order of its sections."""
    both = [_describe(run) for run in (first, second)]
    found = []
    for section in both[0]:
        one, other = (described[section] for described in both)
        for key in dict.fromkeys([*one, *other]):
            values = one.get(key), other.get(key)
            if values[0] != values[1]:
                found.append(Difference(section=section, key=key, values=values))
    return found


def _describe(run: RunFolder) -> dict[str, Mapping[str, Any]]:
    """Return every value of a run that can differ, by section and key."""
    from sparsebp_cli.compare.loaded import flatten
    from sparsebp_cli.plan.seal import read_seal

    plan, history, seal = run.read_plan(), History.load(run.path), read_seal(run.path)
    provenance = {key: plan.get("provenance", {}).get(key) or None for key in ("git_sha", "git_diff_sha256")}
    environment = flatten(history.environments[-1]) if history.environments else {}
    digest = history.facts.get("dataset_digest") or (seal.data if seal else None) or None
    last = {name: history.last(name) for name in (*(one.name for one in LAST), *history.facts.get("metrics", {}))}
    medians = {one.name: history.median(one.name) for one in MEDIAN}
    steps = max((max(points) for points in history.metrics.values() if points), default=0)
    return {
        "recipe": flatten(plan["recipe"]),
        "code": (seal.code if seal else {}) | provenance,
        "data": {"digest": digest},
        "environment": environment,
        "result": {"state": str(run.state()), "steps": steps, **last, **medians},
    }


def _show(value: object) -> str:
    if value is None:
        return ABSENT
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
