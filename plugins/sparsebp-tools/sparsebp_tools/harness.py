"""Evaluate a folder's model on tasks of EleutherAI's lm-evaluation-harness, for ``sparsebp evaluate``.

The request is JSON: ``folder``, ``tasks``, ``limit`` (examples of each task, or null), ``batch_size`` and ``device``.
The harness uses its own defaults and seeds. Only tasks of the installed package are allowed, because a task's file can
run code through its functions, templates, metrics and data. The result has ``version``, and for each task its
``version``, ``hash``, ``examples`` and ``values``, each with its direction. For values that are a mean over examples it
has the ``scores`` of each example.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import DataError, UsageError, did_you_mean
from sparsebp_cli.source import read_config
from sparsebp_cli.source.weight import check_weights
from sparsebp_cli.worker.answer import converse

MOST_EXAMPLES = 10_000  # of a task whose scores a run stores
NO_METRIC = ("name", "alias", "sample_len", "sample_count")  # entries of a task's report that are no metrics


def judge(request: str, tell: Callable[[str, int, int], None]) -> Mapping[str, object]:
    """Return the harness's results for a model. Raise UsageError for an unknown task, DataError without the harness or
    without weights in safetensors."""
    if find_spec("lm_eval") is None:
        raise DataError("lm-eval is not installed: pip install 'sparsebp-tools[lm-eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    asked = json.loads(request)
    folder = Path(asked["folder"])
    if not any(folder.glob("*.safetensors")):  # the harness would also load a pickle
        raise DataError(f"{folder} has no weights in safetensors")
    check_weights(folder, read_config(folder))
    manager = TaskManager()
    for name in asked["tasks"]:
        if name not in manager.all_tasks:
            raise UsageError(f"lm-evaluation-harness has no task {name!r}{did_you_mean(name, manager.all_tasks)}")
    tell(f"{', '.join(asked['tasks'])}", 0, 0)
    found: Any = simple_evaluate(
        model="hf",
        model_args={"pretrained": asked["folder"], "dtype": "auto", "use_safetensors": True},
        tasks=asked["tasks"],
        task_manager=manager,
        limit=asked["limit"],
        batch_size=asked["batch_size"],
        device=asked["device"],
    )
    return {"version": version("lm_eval"), "tasks": {name: _describe(found, name) for name in found["results"]}}


def _describe(found: Any, task: str) -> dict[str, object]:
    ways, samples = found["higher_is_better"].get(task, {}), found["samples"].get(task, [])
    values, scores = dict[str, object](), dict[str, list[float]]()
    for key, value in found["results"][task].items():
        name, _, which = key.partition(",")  # the filter of the answers
        if key in NO_METRIC or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        way = {True: "higher", False: "lower"}.get(ways.get(name), "")
        full = name if which in ("", "none") else f"{name}_{which}"
        values[full] = {"value": float(value), "better": way}
        if each := _score_each(samples, name, which, float(value)):
            scores[full] = each
    number = found["n-samples"].get(task, {}).get("effective")
    about = {"version": found["versions"].get(task), "hash": _hash(samples), "examples": number}
    return about | {"values": values, "scores": scores}


def _score_each(samples: Any, name: str, which: str, value: float) -> list[float]:
    """Return each example's contribution to a value; empty if the value is not their mean, such as a perplexity over
    all words, or if there are too many examples to store."""
    each = [one.get(name) for one in samples if one.get("filter", which) == which]
    if not 0 < len(each) <= MOST_EXAMPLES or not all(isinstance(score, bool | int | float) for score in each):
        return []
    found = [float(score) for score in each]
    return found if math.isclose(math.fsum(found) / len(found), value, rel_tol=1e-6, abs_tol=1e-9) else []


def _hash(samples: Any) -> str:
    """Return the harness's own hash of a task's documents, prompts and targets, as in its results file."""
    from lm_eval.utils import hash_string

    return str(hash_string("".join(one["doc_hash"] + one["prompt_hash"] + one["target_hash"] for one in samples)))


if __name__ == "__main__":
    sys.exit(converse(judge))
