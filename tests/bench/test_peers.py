"""Every way that ``benchmarks/peers.py`` compares has the gradient of one example at a time."""

from __future__ import annotations

import json
import os
import subprocess
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
    return LlamaForCausalLM(LlamaConfig(**peers.TINY, tie_word_embeddings=False, use_cache=False)).train()


def make_unit(peers: Any, kind: str) -> Any:
    return peers.make_unit(kind, peers.TINY["vocab_size"], 6)


@pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults
def test_each_way_has_the_gradient_of_one_example_at_a_time(peers: Any) -> None:
    asked, saved, found = list[str](), list[int](), dict[str, Any]()
    unit = make_unit(peers, "tree")
    peers.measure(make_model(peers), unit, found, 1, lambda: saved.append(1), lambda way: asked.append(way) or 7)
    assert list(found) == list(peers.WAYS)
    ran = {way: row for way, row in found.items() if "refused" not in row}
    assert found.keys() - ran.keys() <= {"by hand, Liger", "by hand, linear_cross_entropy"}  # where they are not there
    assert {way: row["error"] for way, row in ran.items() if not row["error"] < 1e-5} == {}
    assert all(len(row["seconds"]) == 1 and row["bytes"] == 7 for row in ran.values())
    assert found["padded"]["ratio"]["median"] == 1.0
    # What is saved, by count: prompts once, no padding, the head at labels.
    flops = {way: row["flops"] for way, row in ran.items()}
    assert flops["lossless, one batch"] <= flops["lossless"] < flops["by hand"] < flops["padded"]
    assert flops["lossless, one at a time"] < flops["one at a time"]  # prefixes of an update are shared there too
    assert found["lossless"]["lines"] == 1 < found["by hand, prompt cached"]["lines"]
    assert asked == list(ran)
    assert len(saved) == 2 * len(ran) + 1  # after each count and each process, and after the round
    assert peers.WAYS["by hand, prompt cached"].refusal(make_unit(peers, "chats")) == "no prompt is shared"


def test_the_oracle_sees_a_loss_that_is_a_mean_of_means(peers: Any) -> None:
    unit, model = make_unit(peers, "chats"), make_model(peers)
    truth = peers.run_alone(model, unit.examples, unit.num_labels)
    batches = peers.WAYS["padded"].batches(unit)

    def run() -> None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()

    assert peers.count(model, run, truth)["error"] > 1e-3


def test_a_run_that_was_stopped_goes_on_where_it_stood(peers: Any) -> None:
    unit, found = make_unit(peers, "chats"), {}
    chosen = {name: peers.WAYS[name] for name in ("padded", "by hand")}
    peers.WAYS.clear()
    peers.WAYS.update(chosen)
    peers.measure(make_model(peers), unit, found, 1, lambda: None)
    first = json.loads(json.dumps(found))
    peers.measure(make_model(peers), unit, found, 3, lambda: None)
    for name, row in found.items():
        assert (row["flops"], row["seconds"][:1]) == (first[name]["flops"], first[name]["seconds"])
        assert len(row["seconds"]) == 3


@pytest.mark.slow
def test_the_memory_of_a_process_grows_with_the_layers_of_its_model(peers: Any) -> None:
    found = {}
    for layers in (4, 8):
        sizes = {**peers.TINY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
        script = f"import peers; peers.TINY = {sizes!r}; print(peers.hold('deep-chats', 'padded', is_tiny=True))"
        run = [sys.executable, "-c", script]
        env = os.environ | peers.MAPPED | {"PYTHONPATH": str(ROOT / "benchmarks")}
        found[layers] = int(subprocess.run(run, check=True, capture_output=True, text=True, env=env).stdout.split()[-1])
    assert 1.5 < found[8] / found[4] < 2.5


def test_the_guide_says_of_memory_what_was_measured() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text(encoding="utf-8"))
    assert len(record["cases"]) == 7
    shares, held, times, slower = [], [], [], 0
    for case in record["cases"].values():
        ways = case["ways"]
        others = [row for way, row in ways.items() if "lossless" not in way and "bytes" in row]
        least = min(row["bytes"] for row in others)
        shares.append(ways["lossless, one at a time"]["bytes"] / least)
        held.append(ways["lossless"]["bytes"] / least)
        time = ways["lossless, one at a time"]["ratio"]["median"]
        times.append(time / ways["lossless"]["ratio"]["median"])
        slower += time > min(row["ratio"]["median"] for row in others)
    text = " ".join((ROOT / "docs" / "guide" / "lossless.md").read_text(encoding="utf-8").split())
    assert f"used {min(shares):.2f} to {max(shares):.2f} times the memory of" in text
    assert f"took {min(times):.1f} to {max(times):.1f} times as long" in text
    assert f"{slower} of 7 cases" in text
    assert f"used up to {max(held):.1f} times the memory of" in text
