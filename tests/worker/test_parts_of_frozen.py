"""A run of parts of weights under adapters: resumed after a kill, measured, and saved as one model (RoSA)."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparsebp_cli.run import History
from tests.chaos.kill import outcome
from tests.worker.conftest import LLAMA, start, work
from tests.worker.test_resume import wait_for

ROSA = {"name": "subnet", "of": "frozen", "elements": ["*.base_layer"], "keep": 0.02, "batches": 2}
MODEL = {"config": LLAMA, "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
def test_a_killed_run_resumes_identically_and_saves_a_model_with_both_in_it(tiny_recipe, prepared) -> None:
    measure = {"probe_every": 10, "fidelity_every": None}
    recipe = tiny_recipe(
        policy=[ROSA], model=MODEL, training={"max_steps": 20}, checkpoint={"every": 3}, measure=measure
    )
    straight, broken = prepared(recipe), prepared(recipe)
    assert work(straight) == 0, (straight.path / "worker.log").read_text()
    process = start(broken)
    wait_for(broken, lambda: len(History.load(broken.path).series("train/loss")) > 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert work(broken) == 0, (broken.path / "worker.log").read_text()
    assert outcome(straight) == outcome(broken)
    history = History.load(straight.path)
    assert set(history.series("proof/excess_share").values()) == {0.0}
    assert history.series("proof/executed_share") == pytest.approx(history.series("proof/claimed_share"), rel=1e-9)
    model = AutoModelForCausalLM.from_pretrained(straight.path / "model")
    assert not any("lora" in name for name, _ in model.named_parameters())
    weight = next(value for name, value in model.named_parameters() if name.endswith("q_proj.weight"))
    assert bool(torch.isfinite(weight).all())
