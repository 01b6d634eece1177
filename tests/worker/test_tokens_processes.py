"""Two processes that choose what is trained: by the data, as one process does; by themselves, each for its own part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from tests.worker.conftest import LLAMA
from tests.worker.ranks import make_run, train_alone, train_on_two
from tests.worker.test_processes import ABSOLUTE, RELATIVE

pytestmark = pytest.mark.xdist_group("two processes")  # fixtures of this file take long: one process makes them

ALWAYS = {"start": 0.0, "end": 1.0, "interrupt": 0}
CASES = {
    "mask": {"name": "tokens", "score": "mask", "mask_column": "last"},
    "loss": {"name": "tokens", "score": "loss", "keep": 0.5, "within": "example"},
    "loss-in-batch": {"name": "tokens", "score": "loss", "keep": 0.5},
    "selective": {"name": "selective-backprop", **ALWAYS},
}


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], RunFolder]:
    rows = []
    for n in range(111):  # answers of very different lengths: two ranks have not as many targets
        text = f"{n}" + " fox" * (n % 9 + 1)
        rows.append(
            {"prompt": f"{n}", "completion": text[len(f"{n}") :], "last": [[max(0, len(text) - 3 - n % 6), len(text)]]}
        )
    (tiny_folder / "marked.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, processes: int) -> RunFolder:
        values = {
            "version": 1,
            "name": "tiny",
            "model": {"config": LLAMA, "tokenizer": str(tiny_folder / "tokenizer")},
            "dataset": {"name": str(tiny_folder / "marked.jsonl"), "format": "completion", "max_seq_length": 32},
            "training": {
                "max_steps": 4,
                "learning_rate": 3e-3,
                "per_device_train_batch_size": 8 // processes,
                "gradient_accumulation_steps": 2,
            },
            "measure": {"eval_every": 4, "probe_every": None, "fidelity_every": None},
            "target": {"threads": 1, "device": "cpu", "processes": processes, "sharding": "none"},
            "policy": [CASES[name]],
        }
        return make_run(Recipe.model_validate(values), folder)

    made = {(name, processes): make(name, processes) for name in CASES for processes in (1, 2)}
    train_alone([run for (_, processes), run in made.items() if processes == 1])
    train_on_two([run for (_, processes), run in made.items() if processes == 2])
    return made


@pytest.mark.parametrize("name", ["mask", "loss"])
def test_what_does_not_depend_on_the_batch_is_trained_as_in_one_process(runs, name) -> None:
    """``within: example`` chooses the same everywhere; the same number of targets is left of each example's only up to
    rounding, so its weights are compared and its losses are not."""
    one, two = runs[name, 1], runs[name, 2]
    shares = [History.load(run.path).series("policy/trained_share") for run in (one, two)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-12)
    if name == "mask":
        losses = [History.load(run.path).series("train/loss") for run in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
        a, b = (load_file(run.path / "model" / "model.safetensors") for run in (one, two))
        for tensor in a:
            torch.testing.assert_close(a[tensor], b[tensor], rtol=0.0, atol=ABSOLUTE)


@pytest.mark.parametrize("name", ["loss", "loss-in-batch", "selective"])
def test_each_process_chooses_of_its_own_part(runs, name) -> None:
    history = History.load(runs[name, 2].path)
    shares = history.series("policy/trained_share")
    assert len(shares) == 4
    assert all(0.3 < share < 0.7 for share in shares.values())
    assert all(seconds > 0.0 for seconds in history.series("time/scoring_seconds").values())
    assert history.last("train/loss") < history.series("train/loss")[1] * 1.1
