"""The script that made the model makes one again, and says what it made it of."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import pretrain
from sparsebp_cli.source import bundled


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for book in bundled.AUSTEN_BOOKS.values():
        text = (bundled.AUSTEN_FOLDER / book).read_text(encoding="utf-8")
        (folder / book).write_text(text[:10_000], encoding="utf-8")
    return folder


@pytest.mark.long
def test_the_same_texts_and_seed_give_the_same_weights(texts, tmp_path):
    weights = []
    for name in ("first", "second"):
        pretrain.main([str(tmp_path / name), "--texts", str(texts), "--steps", "1", "--seed", "7"])
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]

    folder = tmp_path / "first"
    record = json.loads((folder / "training.json").read_bytes())
    assert set(record["inputs_sha256"]) == {
        "northangerabbey.txt",
        "persuasion.txt",
        "pydoc_data.topics, those of the training split",
    }
    assert str(tmp_path) not in (folder / "training.json").read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    held_out = pretrain.pack(tokenizer, [(texts / pretrain.HELD_OUT).read_text(encoding="utf-8")])
    assert pretrain.evaluate(model, held_out) == pytest.approx(record["held_out_loss"]["all_blocks"], abs=1e-3)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_twentieth():
    shares = [pretrain.rate_share(step, 400) for step in range(401)]
    assert shares[0] == pytest.approx(1 / pretrain.WARMUP_STEPS)
    assert max(shares) == shares[pretrain.WARMUP_STEPS] == 1.0
    assert shares[400] == pytest.approx(0.05)
    assert shares[pretrain.WARMUP_STEPS :] == sorted(shares[pretrain.WARMUP_STEPS :], reverse=True)


def test_a_folder_without_the_held_out_novel_is_refused_in_one_line(texts, tmp_path, capsys):
    (texts / pretrain.HELD_OUT).unlink()
    with pytest.raises(SystemExit) as stopped:
        pretrain.main([str(tmp_path / "model"), "--texts", str(texts)])
    assert stopped.value.code == 2
    assert "needs persuasion.txt" in capsys.readouterr().err
