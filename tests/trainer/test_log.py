"""What was kept and executed is logged with everything else, and looking at it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops
from sparsebp_cli.errors import UsageError
from tests.backward.test_policy_state import Momentum

from .conftest import Make, differing, make_arguments, make_examples, make_model, through, weights

ROWS = {"name": "random", "keep": 0.5, "along": "rows"}
FLOPS = ("flops/forward", "flops/backward_executed", "flops/backward_dense")


class Listener(TrainerCallback):
    """Notes what is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def run(door: Make, folder: Path, policies: Any = (ROWS,), every: int | None = 500, **options: Any) -> Any:
    listener = Listener()
    trainer = door(
        Trainer,
        list(policies),
        {"log_flops_every": every},
        model=make_model(attention_dropout=0.1),
        args=make_arguments(folder, max_steps=6, logging_steps=2, **options),
        train_dataset=make_examples(24),
        callbacks=[listener],
    )
    metrics = trainer.train().metrics
    assert metrics.get("policy/kept_share") == pytest.approx(trainer.policy_callback.engine.report().kept_share)
    trainer.listener = listener
    return trainer


ACCUMULATED = {"gradient_accumulation_steps": 2, "bf16": True}


@pytest.mark.parametrize(("options", "door"), through([{}, ACCUMULATED], [ACCUMULATED]), indirect=["door"])
def test_counting_leaves_no_trace(door: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    never, always = (run(door, tmp_path, [Momentum()], every, **options) for every in (None, 1))
    assert differing(weights(never.model), weights(always.model)) == []
    assert [log["loss"] for log in never.state.log_history[:-1]] == [
        log["loss"] for log in always.state.log_history[:-1]
    ]
    assert never.policy_callback.engine.report() == always.policy_callback.engine.report()
    state, other = (trainer.policy_callback.engine.state_dict() for trainer in (never, always))
    assert (state["index"], state["micro_batch"]) == (other["index"], other["micro_batch"])
    for name, value in state["policy_state"].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["policy_state"][name])), name
    assert not any(name in log for log in never.state.log_history for name in FLOPS)
    assert all(name in log for log in always.state.log_history[:-1] for name in FLOPS)


def test_the_executed_flops_are_those_of_a_micro_batch(door: Make, tmp_path: Path) -> None:
    def count(policies: list[Any]) -> list[float]:
        model = make_model(attention_dropout=0.1).train()
        batch = {key: torch.stack([e[key] for e in make_examples(2)]) for key in ("input_ids", "labels")}
        with sbp.attach(model, policies) as engine, ModuleTrace(model) as trace, count_flops(trace) as flops:
            engine.backward(model(**batch).loss)
        return [float(flops.forward.total()), float(flops.backward.total())]

    half = run(door, tmp_path).state.log_history
    dense = run(door, tmp_path, ["dense"]).state.log_history
    assert [dense[0][name] for name in FLOPS[:2]] == count([])
    assert [half[0][name] for name in FLOPS[:2]] == count([sbp.make_policy("random", keep=0.5, along="rows")])
    assert half[0][FLOPS[1]] < 0.6 * dense[0][FLOPS[1]]
    assert half[0][FLOPS[2]] == dense[0][FLOPS[2]] == dense[0][FLOPS[1]]
    assert all(log[name] == half[0][name] for log in half[:-1] for name in FLOPS)  # each log has the newest counts
    assert half[-1]["total_flos"] == dense[-1]["total_flos"]  # the trainer's own estimate does not see it


def test_the_kept_share_reaches_every_callback_and_the_end(door: Make, tmp_path: Path) -> None:
    trainer = run(door, tmp_path, [{**ROWS, "keep": {"from": 1.0, "to": 0.5, "over": 0.7}}])
    shares = [log["policy/kept_share"] for log in trainer.state.log_history]
    assert shares == [log["policy/kept_share"] for log in trainer.listener.logs]
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] == pytest.approx(0.5, abs=0.05)
    assert shares[3] == pytest.approx(sum(shares[:3]) / 3)


@pytest.mark.parametrize("every", [0, -3])
def test_a_wrong_interval_is_refused(every: int) -> None:
    with pytest.raises(UsageError, match=f"log_flops_every must be None or a whole number of 1 or more, got {every}"):
        sbp.PolicyCallback([], log_flops_every=every)
