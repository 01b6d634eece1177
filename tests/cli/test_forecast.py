"""``sparsebp validate --memory``, as a real process, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.document import read_document

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
RECIPE = {
    "version": 1,
    "name": "large",
    "model": {"name": "model", "dtype": "bfloat16", "lora": {"r": 8}},
    "dataset": {"name": "somebody/elsewhere", "format": "chat", "max_seq_length": 512},
    "backward": {"checkpointing": "full"},
    "training": {"max_steps": 100, "per_device_train_batch_size": 1},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "large.yaml"
    file.write_text(json.dumps(RECIPE))
    return file


@pytest.mark.slow
def test_two_layers_of_8b_by_their_config_alone(cli: Cli, recipe: Path) -> None:
    done = cli("validate", recipe, "--memory", "--gpu", "h100-80gb", "--rate", "200", "-o", "json", real=True)
    assert done.returncode == 0, done.stderr
    (facts,) = read_document(done.stdout)["recipes"]
    found, need = facts["forecast"], facts["policy"]
    policy = found["policy"]
    assert found["device"] == "h100-80gb"
    assert found["batch"]["note"].startswith("assumed: full")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    base = 2 * 128256 * 4096 + 2 * layer + 4096
    assert policy["num_parameters"] - policy["num_trained"] == base
    last = next(iter(policy["phases"].values()))
    assert last["weights"] == pytest.approx(2 * base + 4 * policy["num_trained"], rel=0.001)  # adapters are float32
    assert (need["fit"], facts["dense"]["fit"]) == ("fits", "fits")
    assert need["hours"] == pytest.approx(need["step_flops"] * 100 / 200e12 / 3600)
    assert any(one["changes"][0] == "measure.probe_every=null" for one in found["remedies"])


@pytest.mark.slow
def test_of_several_recipes_each_has_one_line(cli: Cli, recipe: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    (recipe.parent / "model" / "config.json").write_text(json.dumps(CONFIG | small | {"num_key_value_heads": 2}))
    other = recipe.with_name("other.yaml")
    other.write_text(json.dumps(RECIPE | {"name": "another"}))
    done = cli("validate", recipe, other, "--memory", "--gpu", "24gb", "--rate", "200", real=True)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert re.fullmatch(r"large: needs [\d.]+ MB: fits, [\d.]+ MFLOP a step, 100 steps in .+", first)
    assert second.startswith("another: needs ")
    assert last == "more: give one recipe alone to see tables, or -o json for everything"


def test_words_that_are_no_device_or_no_rate_are_refused_before_anything_starts(cli: Cli, recipe: Path) -> None:
    for words, text in (
        (("--memory", "--gpu", "h100"), "--gpu: 'h100' is neither a size"),
        (("--gpu", "h100-80gb"), "--gpu needs --memory"),
        (("--rate", "1"), "--rate needs --memory"),
        (("--memory", "--rate", "-1"), "--rate must be a number of TFLOP/s above 0, or a run, got '-1'"),
    ):
        done = cli("validate", recipe, *words)
        assert done.returncode == 2, words
        assert text in done.stderr
