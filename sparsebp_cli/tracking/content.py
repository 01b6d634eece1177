"""Build what MLflow gets of a run besides metrics: parameters, tags, artifacts and status."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, State, metric
from sparsebp_cli.run.label import Labels
from sparsebp_cli.run.visible import mask

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

RUN_ID = "sparsebp.run_id"
TAGS, NOTE = "sparsebp.tags", "sparsebp.note"
SHOWN = (metric.EVAL_LOSS, metric.EVAL_ACCURACY, metric.TEST_LOSS, metric.LIMIT, metric.REACHED_SHARE, metric.COSINE)
LONGEST_VALUE = 6000  # of a parameter, in MLflow 3.17
LONGEST_TAG = 5000
LONGEST_KEY = 250
DIGEST_LENGTH = 12  # of the data's digest, for a narrow column; the tag has the whole digest

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
    """Return the run's state like ``RunFolder.state``. Read the event log again only if ``history`` is not enough."""
    if run.is_locked("worker"):
        return State.RUNNING
    attempt = history.warm[-1][0] if history.warm else 0
    if history.ends and history.ends[-1]["attempt"] >= attempt and not run.is_locked("target"):
        state = State(history.ends[-1]["status"])
        if state is not State.INTERRUPTED:  # an interrupted run may have been cancelled since
            return state
    return run.state()


def clean_name(name: str) -> str:
    """Replace the characters that MLflow refuses in a metric or parameter name: ``pass@1`` becomes ``pass_1``."""
    parts = [part for part in re.sub(r"[^/\w.\- :]", "_", name).split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:LONGEST_KEY] or "_"


def run_name(plan: Plan) -> str:
    """Return the run's name in MLflow's list. The list sorts by name, so seeds are next to each other."""
    return f"{plan.recipe.name} seed {plan.recipe.training.seed}"


def parameters(plan: Plan) -> dict[str, str]:
    """Return the resolved recipe as flat dotted parameters, shortened to MLflow's limits, with passwords hidden."""
    flat = _flatten(plan.recipe.model_dump(mode="json"), "")
    # Hide before shortening: part of an address with a password would not be recognised.
    return {clean_name(key): mask(text)[:LONGEST_VALUE] for key, text in flat}


def tags(plan: Plan, history: History, state: State, labels: Labels | None = None) -> dict[str, str]:
    """Return the tags of a run."""
    labels = labels or Labels()
    text = history.ends[-1].get("text", "") if history.ends and state.over else ""
    found = {clean_name(key): value for key, value in plan.recipe.tracking.tags.items()}
    found |= {
        "sparsebp.group": plan.group,
        "sparsebp.group_name": f"{plan.recipe.name} {plan.group[:4]}",
        "sparsebp.policies": ",".join(dict.fromkeys(entry.name for entry in plan.recipe.policy)),
        "sparsebp.state": str(state),
        "sparsebp.text": mask(text),
        "sparsebp.dataset_digest": str(history.facts.get("dataset_digest", "")),
        "sparsebp.version": plan.provenance.sparsebp_version,
        "sparsebp.attempts": str(len(history.warm)),
        "sparsebp.not_finite": ",".join(_infinite(history)),
        TAGS: ",".join(labels.tags),
        NOTE: labels.note,
        "mlflow.note.content": _describe_run(plan, history, state),
        "mlflow.source.name": plan.provenance.recipe_file,
        "mlflow.source.git.commit": plan.provenance.git_sha,
    }
    return {key: value[:LONGEST_TAG] for key, value in found.items()}


def artifacts(plan: Plan, history: History) -> dict[str, str]:
    """Return the run's artifacts as file name to content. They are texts, not a folder, so no link is followed."""
    recipe = plan.recipe.model_dump(mode="json")
    if uri := recipe["tracking"]["uri"]:
        recipe["tracking"]["uri"] = mask(uri)
    files = {"recipe.yaml": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)}
    if history.environments:
        files["environment.json"] = json.dumps(history.environments, indent=1) + "\n"
    if plan.provenance.git_diff:
        files["git.diff"] = plan.provenance.git_diff
    return files


def dataset_input(plan: Plan, history: History) -> DatasetInput | None:
    """Return the training data as an input of the run; None until the worker has read them."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    facts, dataset = history.facts, plan.recipe.dataset
    if not facts.get("dataset_digest"):
        return None
    profile: dict[str, object] = {
        "train_examples": facts.get("train_examples"),
        "eval_examples": facts.get("eval_examples"),
    }
    census: Any = facts.get("census") or {}
    profile |= census
    entity = Dataset(
        name=mask(dataset.name).rstrip("/").rpartition("/")[2][:LONGEST_KEY] or "data",
        digest=str(facts["dataset_digest"])[:DIGEST_LENGTH],
        source_type="sparsebp",
        source=json.dumps({"name": mask(dataset.name), "format": str(dataset.format)}),
        profile=json.dumps(profile),
    )
    return DatasetInput(entity, [InputTag("mlflow.data.context", "training")])


def _describe_run(plan: Plan, history: History, state: State) -> str:
    """Return the Markdown at the top of the run's page."""
    policies = ", ".join(entry.name for entry in plan.recipe.policy) or "dense"
    lines = [f"**{plan.recipe.name}**, seed {plan.recipe.training.seed}: {policies}; {state}."]
    shown = [f"{m.name} {value:.4g} {m.unit}".strip() for m in SHOWN if (value := history.last(m.name)) is not None]
    lines += ["", "; ".join(shown) + "."] if shown else []
    return "\n".join([*lines, "", "`sparsebp compare` compares it with other runs."])


def _flatten(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and texts. A list of plain values stays one parameter, such as a pair of betas."""
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
