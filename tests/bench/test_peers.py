"""Every way that ``benchmarks/peers.py`` compares has the gradient of one example at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import peers

    yield peers
    for name in ("peers", "peer_ways", "checkout"):
        sys.modules.pop(name, None)


def make_model(peers: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**peers.TINY, tie_word_embeddings=True, use_cache=False)).train()


@pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults
def test_each_way_has_the_gradient_of_one_example_at_a_time(peers: Any) -> None:
    units, saved, found = peers.make_units(peers.TINY["vocab_size"], 6), [], dict[str, Any]()
    peers.measure(make_model(peers), units["agent"], found, 1, lambda: saved.append(1))
    assert list(found) == list(peers.WAYS)
    ran = {way: row for way, row in found.items() if "refused" not in row}
    assert found.keys() - ran.keys() <= {"by hand, Liger", "by hand, linear_cross_entropy"}  # where they are not there
    assert {way: row["error"] for way, row in ran.items() if not row["error"] < 1e-5} == {}
    assert all(len(row["seconds"]) == 1 and row["bytes"] > 0 for row in ran.values())
    assert found["padded"]["ratio"]["median"] == 1.0
    # What is saved, by count: prompts once, no padding, the head at labels.
    flops = {way: row["flops"] for way, row in ran.items()}
    assert flops["lossless, one batch"] <= flops["lossless"] < flops["by hand"] < flops["padded"]
    assert found["lossless"]["lines"] == 1 < found["by hand, prompt cached"]["lines"]
    assert len(saved) == len(ran) + 1  # after each count, and after the round
    assert peers.WAYS["by hand, prompt cached"].refusal(units["chat"]) == "no prompt is shared"


def test_the_oracle_sees_a_loss_that_is_a_mean_of_means(peers: Any) -> None:
    unit, model = peers.make_units(peers.TINY["vocab_size"], 6)["chat"], make_model(peers)
    truth = peers.run_alone(model, unit.examples, unit.num_labels)
    batches = peers.WAYS["padded"].batches(unit)

    def run() -> None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()

    assert peers.count(model, run, truth)["error"] > 1e-3


def test_a_run_that_was_stopped_goes_on_where_it_stood(peers: Any) -> None:
    unit, found = peers.make_units(peers.TINY["vocab_size"], 6)["chat"], {}
    chosen = {name: peers.WAYS[name] for name in ("padded", "by hand")}
    peers.WAYS.clear()
    peers.WAYS.update(chosen)
    peers.measure(make_model(peers), unit, found, 1, lambda: None)
    first = json.loads(json.dumps(found))
    peers.measure(make_model(peers), unit, found, 3, lambda: None)
    for name, row in found.items():
        assert (row["flops"], row["seconds"][:1]) == (first[name]["flops"], first[name]["seconds"])
        assert len(row["seconds"]) == 3
