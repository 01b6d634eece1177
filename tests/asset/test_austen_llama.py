"""The model of the quickstart is the one that its card describes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import pretrain
from sparsebp_cli.source import bundled


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.austen_llama(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled.austen_llama(), local_files_only=True, use_safetensors=True)


@pytest.fixture(scope="module")
def record():
    return json.loads((bundled.austen_llama() / "training.json").read_bytes())


def test_it_loads_as_a_float32_llama_of_the_stated_size(model, record):
    assert model.config.model_type == "llama"
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == record["parameters"] == 3_729_600
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_its_loss_on_the_held_out_novel_is_the_one_on_the_card(model, tokenizer, record):
    (novel,) = [(bundled.AUSTEN_FOLDER / bundled.AUSTEN_BOOKS["test"]).read_text(encoding="utf-8")]
    blocks_BT = pretrain.pack(tokenizer, [novel])[: pretrain.QUICK_BLOCKS]
    stated = record["held_out_loss"]["first_32_blocks"]
    assert pretrain.evaluate(model, blocks_BT) == pytest.approx(stated, abs=0.005)
    card = (bundled.austen_llama() / "README.md").read_text(encoding="utf-8")
    assert f"{record['held_out_loss']['all_blocks']:.2f}" in card
    assert f"{stated:.2f}" in card


def test_the_log_says_which_texts_it_saw_and_that_the_test_novel_was_only_evaluated(record):
    assert "--texts" in record["command"]
    assert len(record["inputs_sha256"]) == 7
    assert bundled.AUSTEN_BOOKS["test"] == pretrain.HELD_OUT
    assert [point["step"] for point in record["curve"]] == sorted(point["step"] for point in record["curve"])
    assert record["curve"][-1]["held_out"] < record["curve"][0]["held_out"] - 0.5


def test_the_tokenizer_gives_any_text_back_and_adds_nothing(tokenizer):
    text = "Sir Walter\n\tdef f(x):  # \u00e9\u6f22\u00a0\U0001f40d\x00 it ' s ."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)


def test_tokenizer_and_config_agree_on_vocabulary_and_special_tokens(tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size == 2048
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 1, 2)


def test_it_writes_words_of_its_novels(model, tokenizer):
    prompt = tokenizer("She had been", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    words = tokenizer.decode(written[0], skip_special_tokens=True).split()
    vocabulary = set((bundled.AUSTEN_FOLDER / bundled.AUSTEN_BOOKS["train"]).read_text(encoding="utf-8").split())
    assert len(words) > 15
    assert sum(word in vocabulary for word in words) / len(words) > 0.8
