"""What MLflow is told about a run beside its metrics: parameters, tags, artifacts, status."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, State, metric
from sparsebp_cli.run.visible import mask

RUN_ID = "sparsebp.run_id"
TRIAL = "sparsebp.trial"
SHOWN = (metric.EVAL_LOSS, metric.EVAL_ACCURACY, metric.TEST_LOSS, metric.CEILING, metric.REALISED_SHARE, metric.COSINE)
LONGEST_VALUE = 6000  # of a parameter, in MLflow 3.17
LONGEST_TAG = 5000
LONGEST_KEY = 250

STATUS = {
    State.QUEUED: "SCHEDULED",
    State.RUNNING: "RUNNING",
    State.UNREACHABLE: "RUNNING",
    State.FINISHED: "FINISHED",
    State.FAILED: "FAILED",
    State.CANCELLED: "KILLED",
    State.INTERRUPTED: "KILLED",
}


def find_state(run: RunFolder, history: History) -> State:
    """Return the run's state, as ``RunFolder.state`` does, without reading the journal again where it is clear.

    Args:
        run: The run.
        history: Its journal, already read.

    Returns:
        The state.
    """
    if run.is_locked("worker"):
        return State.RUNNING
    attempt = history.warm[-1][0] if history.warm else 0
    if history.ends and history.ends[-1]["attempt"] >= attempt and not run.is_locked("target"):
        state = State(history.ends[-1]["status"])
        if state is not State.INTERRUPTED:  # which may have been cancelled since
            return state
    return run.state()


def clean_name(name: str) -> str:
    """Return a name that MLflow accepts: ``pass@1`` becomes ``pass_1``.

    Args:
        name: Of a metric or parameter.

    Returns:
        The name itself wherever MLflow takes it.
    """
    parts = [part for part in re.sub(r"[^/\w.\- :]", "_", name).split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:LONGEST_KEY] or "_"


def run_name(plan: Plan) -> str:
    """Return what the run is called in MLflow's list, where its seeds stand side by side."""
    return f"{plan.recipe.name} seed {plan.recipe.training.seed}"


def parameters(plan: Plan) -> dict[str, str]:
    """Return the resolved recipe as flat dotted parameters.

    Args:
        plan: The run's.

    Returns:
        Name to text; values are cut at what MLflow stores, passwords in the store's address are hidden.
    """
    flat = _flatten(plan.recipe.model_dump(mode="json"), "")
    return {clean_name(key): mask(text)[:LONGEST_VALUE] for key, text in flat}


def tags(plan: Plan, history: History, state: State, trial: str = "") -> dict[str, str]:
    """Return what one looks for in a list of runs.

    Args:
        plan: The run's.
        history: Its journal.
        state: Its state.
        trial: Its ``trial.json``; empty where it has none. One that is longer than a tag may be is left out.

    Returns:
        Tag to text.
    """
    text = history.ends[-1].get("text", "") if history.ends and state.over else ""
    found = {clean_name(key): value for key, value in plan.recipe.tracking.tags.items()}
    found |= {
        "sparsebp.group": plan.group,
        "sparsebp.group_name": f"{plan.recipe.name} {plan.group[:4]}",
        "sparsebp.policies": ",".join(entry.name for entry in plan.recipe.policy),
        "sparsebp.state": str(state),
        "sparsebp.text": mask(text),
        "sparsebp.dataset_digest": str(history.facts.get("dataset_digest", "")),
        "sparsebp.version": plan.provenance.sparsebp_version,
        "sparsebp.attempts": str(len(history.warm)),
        "sparsebp.not_finite": ",".join(_infinite(history)),
        "mlflow.note.content": _describe_run(plan, history, state),
        "mlflow.source.name": plan.provenance.recipe_file,
        "mlflow.source.git.commit": plan.provenance.git_sha,
    }
    found |= {TRIAL: trial} if 0 < len(trial) <= LONGEST_TAG else {}
    return {key: value[:LONGEST_TAG] for key, value in found.items()}


def artifacts(plan: Plan, history: History) -> dict[str, str]:
    """Return the files that belong to a run in the store, as text: no folder is uploaded, so no link is followed.

    Args:
        plan: The run's.
        history: Its journal.

    Returns:
        File name to content.
    """
    dumped = plan.model_dump(mode="json")
    if uri := dumped["recipe"]["tracking"]["uri"]:
        dumped["recipe"]["tracking"]["uri"] = mask(uri)
    files = {
        "plan.json": json.dumps(dumped, indent=1) + "\n",
        "history.json": _describe_history(history),
        "recipe.yaml": yaml.safe_dump(dumped["recipe"], sort_keys=False, allow_unicode=True),
    }
    if history.environments:
        files["environment.json"] = json.dumps(history.environments, indent=1) + "\n"
    if plan.provenance.git_diff:
        files["git.diff"] = plan.provenance.git_diff
    return files


def _describe_run(plan: Plan, history: History, state: State) -> str:
    """What stands above a run on its page, in Markdown."""
    policies = ", ".join(entry.name for entry in plan.recipe.policy)
    lines = [f"**{plan.recipe.name}**, seed {plan.recipe.training.seed}: {policies}; {state}."]
    shown = [f"{m.name} {value:.4g} {m.unit}".strip() for m in SHOWN if (value := history.last(m.name)) is not None]
    lines += ["", "; ".join(shown) + "."] if shown else []
    return "\n".join([*lines, "", "`pictures/run.svg` under *Artifacts* draws it; `sparsebp compare` compares it."])


def _describe_history(history: History) -> str:
    """All that a journal says beside metrics, so that the run can be read back from the store alone."""
    return json.dumps(history.dump(), allow_nan=True) + "\n"


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Lists of plain values stay one parameter: betas are read as a pair."""
    if isinstance(value, dict) and value:
        children = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        children = list(enumerate(value))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)
        return
    for name, child in children:
        yield from _flatten(child, f"{key}.{name}" if key else str(name))


def _infinite(history: History) -> list[str]:
    infinities = {float("inf"), float("-inf")}
    return sorted(
        name for name, points in history.metrics.items() if any(value in infinities for _, value in points.values())
    )
