"""``benchmarks/headline.py``: ways give the same gradient, a later call goes on, and the prediction counts work."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.block import ROOT

MODULES = ("headline", "measured", "steps", "waiting", "checkout", "modelled_updates")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts can be imported."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (*MODULES, "fake_gpu"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_each_way_gives_the_same_gradient_and_a_later_call_measures_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headline  # type: ignore[import-not-found]

    updates = headline.make_updates(256, 32)
    found = headline.Headline(tmp_path / "out.json", {"device": "cpu"}, {})
    for update in updates[1:]:  # groups, and adapters
        found.measure(update, "tiny", CPU, 1, time.monotonic() + 500)
    assert {key.partition(":")[0] for key in found.rows} == {"GRPO", "LoRA 8B"}
    assert not [row["note"] for row in found.rows.values() if "note" in row]
    assert found.find_wrong() == []
    assert all(row["error"] < 1e-5 and len(row["seconds"]) == 1 for row in found.rows.values())
    flops = {key: row["flops"] for key, row in found.rows.items()}
    assert flops["GRPO: lossless, one batch, sdpa"] < 0.6 * flops["GRPO: padding-free, head at labels, sdpa"]

    monkeypatch.setattr(headline, "make_model", None)  # nothing is left to measure
    again = headline.Headline(tmp_path / "out.json", {"device": "cpu"}, {})
    again.measure(updates[1], "tiny", CPU, 1, time.monotonic() + 500)
    assert again.rows == found.rows
    elsewhere = headline.Headline(tmp_path / "out.json", {"device": "another"}, {})
    assert elsewhere.rows == {}


def test_a_wrong_gradient_is_named(tmp_path: Path) -> None:
    import headline

    found = headline.Headline(tmp_path / "out.json", {}, {})
    row: dict[str, Any] = {"dtype": "bfloat16", "error": 0.004}
    found.rows |= {"SFT: padded, sdpa": row, "SFT: lossless, sdpa": row | {"error": 0.008}}
    assert found.find_wrong() == []
    found.rows["SFT: packed, sdpa"] = row | {"error": 0.02}
    assert found.find_wrong() == ["WRONG  SFT: packed, sdpa: gradient error 2.0e-02, padded 4.0e-03"]


def test_the_prediction_counts_the_work_of_every_position_and_computes_none() -> None:
    import headline
    import modelled_updates  # type: ignore[import-not-found]
    from measured import SIZES  # type: ignore[import-not-found]

    modelled_updates.LARGE = 500  # in so small a model
    update = headline.make_updates(256, 32)[0]
    padded, lossless = (
        next(case for case in headline.list_cases(update, CPU) if case.way.name == name)
        for name in ("padded", "lossless, one batch")
    )
    sizes = SIZES["tiny"]
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    narrow = width * sizes["num_key_value_heads"] // heads
    weights = 2 * width * width + 2 * width * narrow + 3 * width * sizes["intermediate_size"]
    shapes = [batch["input_ids"].shape for batch in padded.way.batches(update)]
    counted = modelled_updates.cost_of_update(padded, "tiny", 2)
    # Each weight: three products of two FLOPs. Each attention: seven products, of half of the pairs.
    linears = sum(6 * rows * length * (2 * weights + width * 256) for rows, length in shapes)
    attention = sum(2 * 7 * rows * length * length * width for rows, length in shapes)
    assert counted.flops == linears + attention
    assert modelled_updates.cost_of_update(lossless, "tiny", 2).flops < 0.8 * counted.flops
