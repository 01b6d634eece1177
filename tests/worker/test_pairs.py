"""A classification of pairs trains with its token types, and the exact policy keeps its gradient with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsebp_cli.run import History
from tests.tokenizers import WORDS, build
from tests.worker.conftest import work

BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.mark.slow
def test_pairs_of_texts_train_alike_with_dense_and_lossless(tmp_path: Path, tiny_recipe, prepared) -> None:
    build("Bert").save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": f"the {WORDS[n % 8]}", "other": " ".join(WORDS[n % 5 :]), "label": n % 2 == 0} for n in range(80)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = []
    for policy in ("dense", "lossless"):
        recipe = tiny_recipe(
            model={"config": BERT, "tokenizer": str(tmp_path / "tokenizer"), "dropout": 0},
            dataset={
                "name": str(tmp_path / "pairs.jsonl"),
                "format": "classification",
                "columns": {"text": ["text", "other"]},
                "max_seq_length": 32,
            },
            policy=[{"name": policy}],
        )
        run = prepared(recipe)
        assert work(run) == 0, (run.path / "worker.log").read_text()
        history = History.load(run.path)
        assert history.facts["label_names"] == ["false", "true"]
        assert history.facts["census"]["splits"]["validation"]["rows"] == 8
        losses.append(list(history.series("train/loss").values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
