"""The same through a recipe: the worker trains the saved model twice, and what its weights moved by is compared."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import create_run
from tests.exactness.judge import MICRO, NUM_UPDATES, WRONG, Outcome, Subject, policy_of
from tests.exactness.step import Step
from tests.exactness.subject import make_model
from tests.trainer.test_trl import make_tokenizer, texts
from tests.worker.conftest import work


def judge_recipe(subject: Subject) -> list[Outcome]:
    """Judge the updates of one run together."""
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, {"SPARSEBP_HOME": name}):
        folder = Path(name)
        make_model(subject.case).save_pretrained(folder / "base")
        make_tokenizer().save_pretrained(folder / "base")
        prompts = [text for text in texts(8, 14, subject.seed) for _ in range(2)]
        rows = [{"prompt": p, "completion": c} for p, c in zip(prompts, texts(16, 10, subject.seed + 1), strict=True)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        moved: list[Any] = []
        for policy in (None, policy_of(subject.case)):
            try:
                moved.append(_train(subject, folder, policy))
            except SparseBPError as error:
                return [Outcome("unjudged" if policy is None else "refused", str(error)[:200])]
        if any(isinstance(one, str) for one in moved):
            is_plain, text = isinstance(moved[0], str), next(one for one in moved if isinstance(one, str))
            said = text.splitlines()[-1] if text else ""
            is_refused = said.startswith("error: ") and "traceback" not in said  # one line, of a policy
            return [Outcome("unjudged" if is_plain else "refused" if is_refused else "wrong", text)]
        (plain, _), (own, journal) = moved
        if (error := plain.error(_without_rounding(own, plain, folder / "base"))) > WRONG:
            return [Outcome("wrong", f"the weights moved otherwise by {error:.1e}")]
        is_packed = "of the positions (" in journal and "lossless is off" not in journal
        return [Outcome("right") if is_packed else Outcome("plain", "its event log has no packed batch")]


def _without_rounding(own: Step, plain: Step, base: Path) -> Step:
    """Take from a movement what the rounding of a weight in each update explains: a gradient may be far smaller."""
    start = load_file(base / "model.safetensors")
    moved = []
    for name, one, other in zip(sorted(start), own.grads, plain.grads, strict=True):
        spacing = torch.finfo(torch.float32).eps * start[name].float().abs() * NUM_UPDATES
        moved.append(torch.where((one - other).abs() <= spacing, other, one))
    return Step(own.loss, tuple(moved))


def _train(subject: Subject, folder: Path, policy: Any) -> tuple[Step, str] | str:
    """Return what the weights moved by and the event log, or the error of the run."""
    dataset = {"name": str(folder / "rows.jsonl"), "format": "completion", "max_seq_length": 32}
    training = {"max_steps": NUM_UPDATES, "learning_rate": 0.01, "per_device_train_batch_size": 3, "optim": "sgd"}
    values: dict[str, Any] = {
        "version": 1,
        "name": "exactness",
        "model": {"name": str(folder / "base")},
        "dataset": dataset,
        "training": training
        | {"gradient_accumulation_steps": MICRO[subject.case["accumulation"]], "lr_scheduler_type": "constant"},
        "measure": {"eval_every": NUM_UPDATES, "probe_every": None},
        "target": {"threads": 1, "device": "cpu"},
    }
    if policy is not None:
        values["policy"] = [{"name": "lossless"} | policy.model_dump(exclude_defaults=True)]
    plan = Plan(recipe=Recipe.model_validate(values))
    run = create_run(plan.run_id)
    plan.save(run.path)
    if work(run):
        return (run.path / "worker.log").read_text(encoding="utf-8").strip()[-300:]
    before, after = (load_file(place / "model.safetensors") for place in (folder / "base", run.path / "model"))
    assert set(before) == set(after)
    moved = tuple(after[name].float() - before[name].float() for name in sorted(before))
    return Step(0.0, moved), (run.path / "journal.jsonl").read_text(encoding="utf-8")
