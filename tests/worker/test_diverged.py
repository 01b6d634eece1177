"""An update that overflows reaches no checkpoint and no model, and the run ends as diverged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sparsebp_cli.errors import DivergedError
from sparsebp_cli.run import History, State
from sparsebp_cli.worker.finite_check import check_result, check_state
from tests.worker.conftest import work

pytestmark = pytest.mark.promise("R23")

# Nothing moves at step 1; at step 2 loss and gradient are finite, and the product with the learning rate is not.
OVERFLOW = {
    "optim": "sgd",
    "learning_rate": 1e38,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 1,
    "optim_args": {"weight_decay": 1e3, "momentum": 0.9},
}


@pytest.mark.parametrize("max_steps", [2, 6])
def test_an_update_that_overflows_reaches_no_checkpoint(tiny_recipe, prepared, max_steps: int) -> None:
    run = prepared(tiny_recipe(training=OVERFLOW | {"max_steps": max_steps}, checkpoint={"every": 1}))
    assert work(run) == 3
    assert run.state() is State.FAILED
    text = History.load(run.path).ends[-1]["text"]
    assert text.startswith("diverged: the update of step 2 made values that are not finite, first in ")
    (newest,) = (run.path / "checkpoints").glob("step-*")
    assert newest.name == "step-00000001"
    for name in ("weights", "optimizer"):
        assert all(tensor.isfinite().all() for tensor in load_file(newest / f"{name}.safetensors").values())
    assert not (run.path / "model").exists()


@pytest.mark.promise("R7")
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_before_the_update(optim, tiny_recipe, prepared) -> None:
    # The first update leaves weights that are finite, and too large for the forward or the backward of the next step.
    training = {"max_steps": 4, "learning_rate": 1e20, "optim": optim, "max_grad_norm": None}
    run = prepared(tiny_recipe(training=training, checkpoint={"every": 1}))
    assert work(run) == 3
    text = History.load(run.path).ends[-1]["text"]
    assert re.match(r"diverged: the (loss|gradient) .*\bstep 2\b.*nothing was updated", text), text
    (newest,) = (run.path / "checkpoints").glob("step-*")
    assert newest.name == "step-00000001"
    assert all(tensor.isfinite().all() for tensor in load_file(newest / "weights.safetensors").values())


def test_a_last_step_without_a_checkpoint_is_looked_at_too(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(training=OVERFLOW | {"max_steps": 2}, checkpoint={"every": 50}))
    assert work(run) == 3
    assert not (run.path / "model").exists()
    assert list((run.path / "checkpoints").iterdir()) == []


def poison(place: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    parameters = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if place == "weight":
        parameters["b"].data[1] = torch.inf
    elif place == "moment":
        optimizer.state[parameters["a"]]["exp_avg_sq"][2] = torch.nan
    return parameters, optimizer


@pytest.mark.parametrize(("place", "name"), [("weight", "first in b;"), ("moment", "first in exp_avg_sq of a;")])
def test_the_first_tensor_that_is_not_finite_is_named(place: str, name: str) -> None:
    with pytest.raises(DivergedError, match=name):
        check_state(*poison(place), step=5)


def test_large_values_are_not_taken_for_infinite_ones() -> None:
    parameters, optimizer = poison("nothing")
    parameters["a"].data.fill_(3e38)  # a sum or a square of these would overflow
    check_state(parameters, optimizer, step=5)
    check_state({}, torch.optim.SGD(parameters.values()), step=5)


def test_a_held_out_loss_that_is_no_number_is_no_result() -> None:
    check_result(2.5, 10)
    with pytest.raises(DivergedError, match="the held-out loss is nan after the last step, 10"):
        check_result(float("nan"), 10)


def test_the_look_costs_one_number_to_wait_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parameters, optimizer = poison("nothing")
    waits = []
    read = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: waits.append(1) or read(tensor))
    check_state(parameters, optimizer, step=5)
    assert len(waits) == 1
