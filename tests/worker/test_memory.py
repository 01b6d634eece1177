"""The memory of a watched step in a run: true, small, in the journal, and without a trace in the training."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.memory import PARTS, MemoryCurve
from sparsebp_cli.run.metric import METRICS
from tests.worker.conftest import LLAMA, work

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NAMES = [f"memory/step_peak_{part}_bytes" for part in ("weight", "gradient", "optimizer", "activation", "workspace")]


@pytest.fixture
def finished(tiny_recipe, prepared) -> Any:
    def run(**sections: Any) -> tuple[RunFolder, History]:
        measure = {"probe_every": 100, "fidelity_every": None, "eval_every": 5, "eval_examples": 8}
        measure |= sections.pop("measure", {})
        folder = prepared(tiny_recipe(**sections, measure=measure))
        assert work(folder) == 0, (folder.path / "worker.log").read_text()
        return folder, History.load(folder.path)

    return run


def test_the_split_of_the_peak_is_that_of_the_model_its_gradients_and_its_state(finished) -> None:
    folder, history = finished()
    assert list(history.memory) == list(history.series("memory/step_peak_bytes")) == [3, 10]
    weights, state = history.last("memory/weight_bytes"), history.last("memory/optimizer_bytes")
    inverse_frequencies = 4 * 8 // 2  # buffers of the rotary embedding
    for step, values in history.memory.items():
        curve = MemoryCurve.from_values(values)
        split = curve.peak.split
        assert [history.series(name)[step] for name in NAMES] == [getattr(split, part) for part in PARTS]
        assert history.series("memory/step_peak_bytes")[step] == split.total
        highest = dict(zip(PARTS, values["highest"], strict=True))
        assert 0 <= highest["weights"] - weights <= 4 * inverse_frequencies
        assert highest["gradients"] == weights
        assert highest["optimizer"] == state == curve.points[0].split.optimizer
        assert values["allocator_peak_bytes"] is None
        phases = [p.phase for n, p in enumerate(curve.points) if n == 0 or curve.points[n - 1].phase != p.phase]
        assert phases == ["forward", "backward", "update"]
        assert len(values["points"]) <= 300
    records = [line for line in (folder.path / "journal.jsonl").read_bytes().splitlines() if b'"memory"' in line]
    assert all(len(record) < 30_000 for record in records)


def test_what_is_saved_at_the_end_of_the_forward_is_what_the_probe_counts(finished) -> None:
    """The probe leaves out what is there anyway: parameters alone, so rotary's buffer is in it."""
    _, history = finished(measure={"probe_every": 3}, training={"max_steps": 9})
    curve = MemoryCurve.from_values(history.memory[3])
    saved = max(point.split.activations for point in curve.points if point.phase == "forward")
    assert 0 <= history.series("memory/saved_for_backward_bytes")[3] - saved <= 64


@pytest.mark.always("walk")
@pytest.mark.parametrize(
    ("config", "policy", "backward"),
    [
        (LLAMA | {"attention_dropout": 0.2}, {"name": "topk", "keep": 0.25}, {}),
        (GPT2, {"name": "random", "keep": 0.5, "error_feedback": True}, {"checkpointing": "full"}),
        (LLAMA, {"name": "topk", "keep": 0.5}, {"sites": "nodes", "execution": "reference"}),
    ],
    ids=["linears", "checkpointing", "walk"],
)
def test_a_watched_run_equals_one_that_is_not_watched(tiny_recipe, prepared, config, policy, backward) -> None:
    sections = {"model": {"config": config}, "policy": [policy], "backward": backward}
    training = {"max_steps": 5, "gradient_accumulation_steps": 2}
    histories, weights = [], []
    for every in (100, None):
        measure = {"probe_every": every, "fidelity_every": None, "eval_every": 1, "eval_examples": 8}
        run = prepared(tiny_recipe(**sections, training=training, measure=measure))
        assert work(run) == 0, (run.path / "worker.log").read_text()
        histories.append(History.load(run.path))
        weights.append((run.path / "model" / "model.safetensors").read_bytes())
    watched, plain = histories
    assert weights[0] == weights[1]
    assert list(watched.memory) == [3, 5]
    assert not plain.memory
    for name in plain.metrics:
        if not METRICS[name].timing:
            assert watched.series(name) == plain.series(name), name
    curve = MemoryCurve.from_values(watched.memory[5])
    phases = [p.phase for n, p in enumerate(curve.points) if n == 0 or curve.points[n - 1].phase != p.phase]
    assert phases == ["forward", "backward", "forward", "backward", "update"]


def test_the_time_of_a_watched_step_is_told_in_warm_up_alone(finished) -> None:
    _, history = finished(training={"max_steps": 6})
    assert list(history.series("time/step_seconds")) == [1, 2, 3, 4, 5]
    assert list(history.series("train/loss")) == [1, 2, 3, 4, 5, 6]
    _, history = finished(training={"max_steps": 4}, measure={"warmup_steps": 0})
    assert list(history.memory) == [2, 4]
    assert list(history.series("throughput/tokens_per_sec")) == [1, 3]


def test_saving_less_is_seen_in_the_split(finished) -> None:
    full, sparse = (
        finished(policy=[{"name": "topk", "keep": 0.25}], backward=backward)[1]
        for backward in ({}, {"checkpointing": "full"})
    )
    name = "memory/step_peak_activation_bytes"
    assert sparse.last(name) < 0.7 * full.last(name)
    for same in ("memory/step_peak_weight_bytes", "memory/step_peak_optimizer_bytes"):
        assert sparse.last(same) == full.last(same)


def test_a_run_of_one_step_is_watched_once(finished) -> None:
    _, history = finished(training={"max_steps": 1})
    assert list(history.memory) == [1]
    assert MemoryCurve.from_values(history.memory[1]).points[0].split.optimizer == 0


@pytest.mark.parametrize(
    "policy", [{"name": "dense"}, {"name": "tokens", "score": "loss", "keep": 0.4, "mode": "detach"}]
)
def test_a_step_watched_first_after_a_resume_has_the_same_memory(finished, prepared, policy) -> None:
    folder, history = finished(checkpoint={"every": 2, "keep_last": 9}, policy=[policy])
    resumed = prepared(Plan.load(folder.plan_file).recipe)
    shutil.copytree(folder.path / "checkpoints" / "step-00000002", resumed.path / "checkpoints" / "step-00000002")
    assert work(resumed) == 0, (resumed.path / "worker.log").read_text()
    again = History.load(resumed.path)
    assert again.series("train/loss") == {s: v for s, v in history.series("train/loss").items() if s > 2}
    for name in ("memory/step_peak_bytes", *NAMES):
        assert again.series(name) == history.series(name), name
