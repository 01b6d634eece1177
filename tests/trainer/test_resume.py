"""A training that is resumed from a checkpoint goes on as the one that was not stopped, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from sparsebp_cli.errors import CheckpointError, UsageError
from sparsebp_cli.trainer.state import load_state, save_state

from .conftest import Make, differing, is_free, make_arguments, make_examples, make_model, through, weights

STATE = "sparsebp-0.safetensors"
POLICY = {"name": "random", "keep": 0.5, "along": "rows"}
OPTIONS = {"gradient_accumulation_steps": 2, "max_steps": 8, "save_strategy": "steps", "save_steps": 3}


def build(door: Make, folder: Path, policy: dict[str, Any] | None = None, **options: Any) -> Any:
    return door(
        Trainer,
        [policy or POLICY],
        {"backward": {"exclude": ["lm_head"]}},
        model=make_model(attention_dropout=0.1),
        args=make_arguments(folder, **(OPTIONS | options)),
        train_dataset=make_examples(20),
    )


@pytest.mark.always("3-PolicyCallback")
@pytest.mark.parametrize(("step", "door"), through([3, 6], [3]), indirect=["door"])
def test_a_resumed_training_ends_with_the_same_weights(step: int, door: Make, tmp_path: Path) -> None:
    whole = build(door, tmp_path)
    whole.train()
    resumed = build(door, tmp_path / "again")
    with torch.no_grad():
        resumed.model.lm_head.weight.zero_()  # the checkpoint brings its own
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert resumed.state.global_step == 8
    assert resumed.policy_callback.engine.state_dict()["index"] == 8
    assert differing(weights(whole.model), weights(resumed.model)) == []
    if step == 3:  # were the state not read, this would be seen
        file = tmp_path / "checkpoint-3" / STATE
        state = load_state(file)
        save_state(file, {**state, "engine": {**state["engine"], "index": 4}})
        other = build(door, tmp_path / "third")
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert differing(weights(whole.model), weights(other.model))


@pytest.mark.always("PolicyTrainer")
def test_a_resumed_training_goes_on_with_the_schedule_of_an_option(door: Make, tmp_path: Path) -> None:
    policy = {"name": "random", "along": "rows", "keep": {"from": 1.0, "to": 0.25, "over": 0.75, "by": "cosine"}}
    whole = build(door, tmp_path, policy)
    whole.train()
    resumed = build(door, tmp_path / "again", policy)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert differing(weights(whole.model), weights(resumed.model)) == []
    other = build(door, tmp_path / "third", policy | {"keep": 0.25})
    with pytest.raises(UsageError, match=r"policies.0.keep was {'from': 1.0, .*}, got 0.25"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.always("PolicyTrainer")
def test_true_resumes_from_the_newest_checkpoint(door: Make, tmp_path: Path) -> None:
    whole = build(door, tmp_path, save_total_limit=1)
    whole.train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]
    longer = build(door, tmp_path, max_steps=10)
    longer.train(resume_from_checkpoint=True)
    assert longer.policy_callback.engine.state_dict()["index"] == 10


def test_what_cannot_be_resumed_from_is_refused_before_anything_changes(door: Make, tmp_path: Path) -> None:
    build(door, tmp_path, max_steps=3).train()
    good, bad = tmp_path / "checkpoint-3", tmp_path / "bad"
    shutil.copytree(good, bad)
    text = (good / STATE).read_bytes()

    def refuse(match: str, kind: type[Exception], policy: dict[str, Any] | None = None, folder: Path = bad) -> None:
        trainer = build(door, tmp_path, policy)
        before = weights(trainer.model)
        with pytest.raises(kind, match=match) as caught:
            trainer.train(resume_from_checkpoint=str(folder))
        assert "\n" not in str(caught.value)
        assert is_free(trainer)
        assert differing(before, weights(trainer.model)) == []

    for place in (12, len(text) // 2, len(text) - 1):
        (bad / STATE).write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        refuse("is damaged", CheckpointError)
    (bad / STATE).write_bytes(text[:-7])
    refuse("is damaged", CheckpointError)
    (bad / STATE).unlink()
    refuse("sparsebp-0.safetensors, the state of the policies, is missing", CheckpointError)
    refuse(r"policies.0.keep was 0.5, got 0.25", UsageError, POLICY | {"keep": 0.25}, good)


def test_a_state_comes_back_as_it_was_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    state = {
        "index": 3,
        "cut": {"a.b": torch.randn(3, 2), "c": torch.tensor(2.5, dtype=torch.bfloat16)},
        "parts": [{"seen": [1, 2.5, None, "x", True], 4: {}}, []],
    }
    save_state(tmp_path / "state", state)
    found = load_state(tmp_path / "state")
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    assert found["parts"] == state["parts"]
    assert found["index"] == 3
    for name, tensor in state["cut"].items():  # type: ignore[attr-defined]
        assert found["cut"][name].dtype == tensor.dtype
        assert torch.equal(found["cut"][name], tensor)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_state(tmp_path / "none" / "state", state)
