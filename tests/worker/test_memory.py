"""The peak of a step's tensors in a run on a CPU: true, in the event log, and without a trace in the training."""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.metric import METRICS
from sparsebp_cli.worker.peak_memory import measure_live_peak
from sparsebp_tools.memory import memory_trace
from tests.worker.conftest import LLAMA, work

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PEAK = "memory/step_peak_bytes"


@pytest.fixture
def finished(tiny_recipe, prepared) -> Any:
    def run(**sections: Any) -> tuple[RunFolder, History]:
        measure = {"probe_every": 100, "fidelity_every": None, "eval_every": 5, "eval_examples": 8}
        measure |= sections.pop("measure", {})
        folder = prepared(tiny_recipe(**sections, measure=measure))
        assert work(folder) == 0, (folder.path / "worker.log").read_text()
        return folder, History.load(folder.path)

    return run


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_peak_is_that_of_the_trace_of_the_same_step(momentum: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise((8, 16, 4, 64))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    x, teacher = torch.randn(32, 8), [torch.randn(1000)]

    def step() -> dict[str, float | None]:
        teacher[0] = torch.randn(10)  # what was there before goes
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {}

    step()
    states = [state for state in optimizer.state.values() for state in state.values() if state is not None]
    teacher[0] = torch.randn(1000)
    _, found = measure_live_peak(step, iter([*model.parameters(), *states, x, *teacher]))
    teacher[0] = torch.randn(1000)
    with memory_trace(model, optimizer, also=[x, teacher]) as trace:
        step()
    assert found == trace.peak.split.total


def test_two_steps_of_a_run_have_a_peak(finished) -> None:
    folder, history = finished()
    assert list(history.series(PEAK)) == [3, 10]
    weights, state = history.last("memory/weight_bytes"), history.last("memory/optimizer_bytes")
    assert weights + state < history.last(PEAK) < 4 * (weights + state)
    assert b'"memory"' not in (folder.path / "journal.jsonl").read_bytes()


@pytest.mark.always("walk")
@pytest.mark.parametrize(
    ("config", "policy", "backward"),
    [
        (LLAMA | {"attention_dropout": 0.2}, {"name": "topk", "keep": 0.25}, {}),
        (GPT2, {"name": "random", "keep": 0.5}, {"checkpointing": "full"}),
        (LLAMA, {"name": "topk", "keep": 0.5}, {"sites": "nodes", "execution": "reference"}),
    ],
    ids=["linears", "checkpointing", "walk"],
)
def test_a_run_with_measured_steps_equals_one_without(tiny_recipe, prepared, config, policy, backward) -> None:
    sections = {"model": {"config": config}, "policy": [policy], "backward": backward}
    training = {"max_steps": 5, "gradient_accumulation_steps": 2}
    histories, weights = [], []
    for every in (100, None):
        measure = {"probe_every": every, "fidelity_every": None, "eval_every": 1, "eval_examples": 8}
        run = prepared(tiny_recipe(**sections, training=training, measure=measure))
        assert work(run) == 0, (run.path / "worker.log").read_text()
        histories.append(History.load(run.path))
        weights.append((run.path / "model" / "model.safetensors").read_bytes())
    measured, plain = histories
    assert weights[0] == weights[1]
    assert list(measured.series(PEAK)) == [3, 5]
    assert not plain.series(PEAK)
    for name in plain.metrics:
        if not METRICS[name].timing:
            assert measured.series(name) == plain.series(name), name


def test_the_time_of_a_measured_step_is_told_in_warm_up_alone(finished) -> None:
    _, history = finished(training={"max_steps": 6})
    assert list(history.series("time/step_seconds")) == [1, 2, 3, 4, 5]
    assert list(history.series("train/loss")) == [1, 2, 3, 4, 5, 6]
    _, history = finished(training={"max_steps": 4}, measure={"warmup_steps": 0})
    assert list(history.series(PEAK)) == [2, 4]
    assert list(history.series("throughput/tokens_per_sec")) == [1, 3]


def test_saving_less_lowers_the_peak(finished) -> None:
    full, sparse = (
        finished(policy=[{"name": "topk", "keep": 0.25}], backward=backward)[1]
        for backward in ({}, {"checkpointing": "full"})
    )
    assert sparse.last(PEAK) < full.last(PEAK)


def test_a_run_of_one_step_is_measured_once(finished) -> None:
    _, history = finished(training={"max_steps": 1})
    assert list(history.series(PEAK)) == [1]


@pytest.mark.parametrize(
    "policy", [{"name": "dense"}, {"name": "tokens", "score": "loss", "keep": 0.4, "mode": "detach"}]
)
def test_a_step_measured_first_after_a_resume_has_the_same_peak(finished, prepared, policy) -> None:
    folder, history = finished(checkpoint={"every": 2, "keep_last": 9}, policy=[policy])
    resumed = prepared(Plan.load(folder.plan_file).recipe)
    shutil.copytree(folder.path / "checkpoints" / "step-00000002", resumed.path / "checkpoints" / "step-00000002")
    assert work(resumed) == 0, (resumed.path / "worker.log").read_text()
    again = History.load(resumed.path)
    assert again.series("train/loss") == {s: v for s, v in history.series("train/loss").items() if s > 2}
    assert again.series(PEAK) == history.series(PEAK)
