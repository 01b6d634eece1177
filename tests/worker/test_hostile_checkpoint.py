"""Hostile checkpoints: what a run goes on from is safetensors and JSON, and nothing that lies in them runs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebp_cli.errors import CheckpointError
from sparsebp_cli.run import History
from sparsebp_cli.run.manifest import MANIFEST, digest
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from tests.worker.conftest import work
from tests.worker.test_checkpoint_folder import snapshot
from tests.worker.test_hostile_model import Trap

pytestmark = pytest.mark.promise("R12")

PICKLES = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin", "pytorch_model.bin",
    "model.pt", "scaler.pt", "custom_checkpoint_0.pkl", "weights.pkl", "random.bin", "policy.pickle", "state.pt",
)  # fmt: skip
FILES = ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "policy.safetensors")
Change = Callable[[Path], object]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A good checkpoint; ``pickle`` beside its folder makes a canary when it is read."""
    torch.save({"a": Trap(tmp_path / "canary")}, tmp_path / "pickle")
    (tmp_path / "checkpoints").mkdir()
    return CheckpointFolder(tmp_path / "checkpoints", keep_last=2).save(snapshot(3))


def seal_again(place: Path) -> None:
    """A manifest that agrees with the files: whoever made the folder made it as well."""
    listed = {file.name: digest(file) for file in place.iterdir() if file.is_file() and file.name != MANIFEST}
    (place / MANIFEST).write_text(json.dumps({"format": 1, "sha256": listed}))


def load(place: Path) -> Any:
    return CheckpointFolder(place.parent, keep_last=2).load_newest_good()


def state(**values: Any) -> Change:
    """Change keys of state.json."""

    def change(place: Path) -> None:
        file = place / "state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def text(name: str, data: str) -> Change:
    return lambda place: (place / name).write_text(data)


REFUSED: dict[str, Change] = {
    **{f"pickle as {name}": (lambda place, name=name: shutil.copy(place.parents[1] / "pickle", place / name))
       for name in (*FILES, "state.json", "seal.json", MANIFEST)},
    **{f"plain pickle as {name}": (
        lambda place, name=name: (place / name).write_bytes(pickle.dumps(Trap(place.parents[1] / "canary"))))
       for name in (*FILES, "state.json")},
    "no weights": lambda place: (place / "weights.safetensors").unlink(),
    "weights are a folder": lambda place: ((place / "weights.safetensors").unlink(),
                                           (place / "weights.safetensors").mkdir()),
    "state is a list": text("state.json", "[]"),
    "deep state": text("state.json", '{"a":' * 100_000),
    "plain state is a list": state(optimizer_plain=[1]),
    "numbers are texts": state(optimizer_plain={"x.step": 1}),
    "deep seal": text("seal.json", "[" * 100_000),
    "manifest that leads out": lambda place: (place / MANIFEST).write_text(
        json.dumps({"format": 1, "sha256": {"../../../pickle": digest(place.parents[1] / "pickle")}})),
    "manifest is a list": text(MANIFEST, "[]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_of_other_content_is_refused_in_one_line_and_runs_nothing(name: str, place: Path) -> None:
    REFUSED[name](place)
    if "manifest" not in name:
        seal_again(place)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be loaded: checkpoint step-00000003 (has an unknown|is damaged)"
    ) as caught:
        load(place)
    assert "\n" not in str(caught.value)
    assert "nothing was deleted" in str(caught.value)
    assert place.is_dir()
    assert not (place.parents[1] / "canary").exists()


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_beside_a_checkpoint_are_not_read(name: str, place: Path) -> None:
    for folder in (place, place.parent, place.parents[1]):
        shutil.copy(place.parents[1] / "pickle", folder / name)
    seal_again(place)
    found, damaged = load(place)
    assert (found.step, damaged) == (3, [])
    assert not (place.parents[1] / "canary").exists()


def test_an_older_checkpoint_is_taken_where_the_newest_is_none_of_ours(place: Path) -> None:
    newest = CheckpointFolder(place.parent, keep_last=2).save(snapshot(4))
    shutil.copy(place.parents[1] / "pickle", newest / "optimizer.safetensors")
    seal_again(newest)
    found, (line,) = load(place)
    assert found.step == 3
    assert "step-00000004 has an unknown format" in line
    assert not (place.parents[1] / "canary").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            state(random={"python": [3, ["os.system"], None], "numpy": ["MT19937", [1], 0, 0, 0.0]}),
            "does not fit this run",
        ),
        (state(random={"python": {"__reduce__": 1}, "numpy": None}), "does not fit this run's recipe"),
        (
            state(rest={"schedule": {"_step_count": "x"}, "engine": {"cut": 1}, "tokens": "x"}),
            "does not fit this run's recipe",
        ),
        (state(optimizer_groups=[{"params": "x"}]), "another optimizer than"),
        (
            lambda place: shutil.copy(place.parents[2] / "pickle", place / "random.safetensors"),
            "no checkpoint can be loaded",
        ),
    ],
)
def test_a_worker_refuses_a_hostile_checkpoint_in_one_line(
    tiny_recipe: Any, prepared: Any, change: Change, says: str, tmp_path: Path
) -> None:
    recipe = tiny_recipe(training={"max_steps": 2}, checkpoint={"every": 1, "keep_last": 1})
    run = prepared(recipe)
    assert work(run) == 0
    run_again = prepared(recipe)
    shutil.copytree(run.path / "checkpoints", run_again.path / "checkpoints")
    torch.save({"a": Trap(tmp_path / "canary")}, run_again.path.parent / "pickle")
    (place,) = (run_again.path / "checkpoints").iterdir()
    for name in PICKLES:
        shutil.copy(run_again.path.parent / "pickle", place / name)
    change(place)
    seal_again(place)
    assert work(run_again) in {1, 2}
    end = History.load(run_again.path).ends[-1]
    assert says in end["text"]
    assert "\n" not in end["text"]
    assert "Traceback" not in run_again.log_file.read_text()
    assert not (tmp_path / "canary").exists()


def test_a_checkpoint_whose_weight_decay_had_other_parameters_is_refused(tiny_recipe: Any, prepared: Any) -> None:
    training = {"max_steps": 2, "weight_decay": 0.1, "weight_decay_of": "matrices"}
    recipe = tiny_recipe(training=training, checkpoint={"every": 1, "keep_last": 1})
    run, run_again = prepared(recipe), prepared(recipe)
    assert work(run) == 0
    shutil.copytree(run.path / "checkpoints", run_again.path / "checkpoints")
    (place,) = (run_again.path / "checkpoints").iterdir()
    matrices, others = json.loads((place / "state.json").read_text())["optimizer_groups"]
    others["params"].insert(0, matrices["params"].pop())
    state(optimizer_groups=[matrices, others])(place)
    seal_again(place)
    assert work(run_again) in {1, 2}
    text = History.load(run_again.path).ends[-1]["text"]
    assert "other parameters had weight decay (training.weight_decay_of)" in text
