"""Encoder-decoders and masked language models learn from what transformers' own path gives them, and what cannot be
trained is refused without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    Wav2Vec2Config,
)

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection, ModelSection
from sparsebp_cli.source.architecture import find_architecture
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.worker.batch import BatchOrder, collate, micro_batch_loss, num_targets
from sparsebp_cli.worker.data import IGNORED
from sparsebp_cli.worker.encoding import EncodedExample
from sparsebp_cli.worker.evaluate import ExampleLosses, evaluate
from sparsebp_cli.worker.format import encode
from sparsebp_cli.worker.gap import Gaps
from sparsebp_cli.worker.model import build_model

WORDS = [f"w{number}" for number in range(40)]
CPU = torch.device("cpu")
SMALL = {"num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "dropout_rate": 0.0}


@pytest.fixture(scope="module")
def t5_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("$A </s>", [("</s>", 1)], eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def bert_tokenizer() -> PreTrainedTokenizerFast:
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "<pad>"}
    return make_tokenizer("[CLS] $A [SEP]", [("[CLS]", 3), ("[SEP]", 4)], **names)


def make_tokenizer(single: str, special: list[tuple[str, int]], **names: str) -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "</s>", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    plain = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", **names)


def t5(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **SMALL)
    return T5ForConditionalGeneration(config).train()


def bert(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes, **rates)).train()


def pairs(tokenizer: PreTrainedTokenizerFast, length: int = 16) -> list[EncodedExample]:
    rows = [{"prompt": " ".join(WORDS[: 3 + n]), "completion": " ".join(WORDS[n : 2 * n + 1])} for n in range(9)]
    section = DatasetSection(name="x", format="completion", max_seq_length=length)
    return encode(as_rows(rows, "f, row"), section, tokenizer, architecture="encoder-decoder").examples


def gradient(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_pairs_equal_the_inputs_and_the_loss_of_transformers_collator(t5_tokenizer: PreTrainedTokenizerFast) -> None:
    model, examples = t5(t5_tokenizer), pairs(t5_tokenizer)
    given = [{"input_ids": e.input_ids.tolist(), "labels": e.labels.tolist()} for e in examples]
    assert given[2] == {
        "input_ids": t5_tokenizer("w0 w1 w2 w3 w4")["input_ids"],
        "labels": t5_tokenizer(text_target="w2 w3 w4")["input_ids"],
    }
    theirs = DataCollatorForSeq2Seq(t5_tokenizer, pad_to_multiple_of=8)(given)
    ours = collate(examples, 0)
    for name in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(ours[name], theirs[name].to(ours[name].dtype))
    assert num_targets(ours) == sum(len(e.labels) for e in examples)
    plain = gradient(model, model(**theirs).loss)
    # Micro-batches of unequal numbers of targets add up to the mean over all of them.
    parts = [collate(examples[:2], 0), collate(examples[2:], 0)]
    total = sum(micro_batch_loss(model, part, num_targets(ours), CPU) for part in parts)
    assert isinstance(total, torch.Tensor)
    assert torch.allclose(gradient(model, total), plain, atol=1e-6)


def test_evaluations_of_pairs_and_gaps_are_means_over_targets_in_place(
    t5_tokenizer: PreTrainedTokenizerFast, bert_tokenizer: PreTrainedTokenizerFast
) -> None:
    gaps = Gaps.of(bert_tokenizer)
    for model, examples in (
        (t5(t5_tokenizer), pairs(t5_tokenizer)),
        (bert(bert_tokenizer), gaps.draw_all(packed(bert_tokenizer))),
    ):
        each = ExampleLosses()
        batches = [collate(examples[:4], 0), collate(examples[4:], 0)]
        value = evaluate(model, batches, CPU, each)["eval/loss"]
        mean = sum(loss * count for loss, count in zip(each.loss, each.targets, strict=True)) / sum(each.targets)
        assert value == pytest.approx(mean, rel=1e-4)
        assert sum(each.targets) == sum(map(num_targets, batches))


def packed(tokenizer: PreTrainedTokenizerFast) -> list[EncodedExample]:
    rows = [{"text": " ".join(np.random.default_rng(n).choice(WORDS, 60))} for n in range(20)]
    section = DatasetSection(name="x", max_seq_length=64)
    return encode(as_rows(rows, "f, row"), section, tokenizer, architecture="masked").examples


def test_gaps_are_drawn_as_bert_does_and_special_tokens_never(bert_tokenizer: PreTrainedTokenizerFast) -> None:
    examples, gaps = packed(bert_tokenizer), Gaps.of(bert_tokenizer)
    special, counts = list(bert_tokenizer.all_special_ids), np.zeros(4)
    for visit in range(60):
        for place, example in enumerate(examples):
            drawn = gaps.draw(example, 0, visit, place)
            is_gap = drawn.labels != IGNORED
            assert (drawn.labels[is_gap] == example.input_ids[is_gap]).all()
            assert (drawn.input_ids[~is_gap] == example.input_ids[~is_gap]).all()
            assert not np.isin(example.input_ids[is_gap], special).any()
            masked = drawn.input_ids[is_gap] == gaps.mask_token_id
            same = drawn.input_ids[is_gap] == example.input_ids[is_gap]
            counts += [(~np.isin(example.input_ids, special)).sum(), is_gap.sum(), masked.sum(), same.sum()]
    assert counts[1] / counts[0] == pytest.approx(0.15, abs=0.005)
    assert counts[2] / counts[1] == pytest.approx(0.8 + 0.1 / len(bert_tokenizer), abs=0.02)
    assert counts[3] / counts[1] == pytest.approx(0.1 + 0.1 / len(bert_tokenizer), abs=0.02)


def test_every_visit_has_other_gaps_and_a_resumed_run_the_same(bert_tokenizer: PreTrainedTokenizerFast) -> None:
    examples = packed(bert_tokenizer)
    first, second = (BatchOrder(examples, 4, 0, 0) for _ in range(2))
    first.gaps = second.gaps = Gaps.of(bert_tokenizer)
    numbers = range(2 * len(examples) // 4)
    seen = [first[number]["input_ids"] for number in numbers]
    assert all(torch.equal(seen[number], second[number]["input_ids"]) for number in reversed(numbers))
    assert len({bytes(batch.numpy().tobytes()) for batch in seen}) == len(seen)


@pytest.mark.parametrize(
    ("config", "data_format", "found"),
    [
        ({"model_type": "llama"}, "chat", "causal"),
        ({"model_type": "t5"}, "completion", "encoder-decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "completion", "encoder-decoder"),
        ({"model_type": "bart", "is_encoder_decoder": False}, "text", "causal"),
        ({"model_type": "bert"}, "text", "masked"),
        ({"model_type": "bert", "is_decoder": True}, "text", "causal"),
        ({"model_type": "bert"}, "classification", "classifier"),
        ({"model_type": "of-a-plugin"}, "text", "causal"),
    ],
)
def test_what_is_trained_follows_from_the_config(config: dict[str, Any], data_format: str, found: str) -> None:
    assert find_architecture(config, data_format) == found


@pytest.mark.parametrize(("given", "start"), [({}, 0), ({"decoder_start_token_id": 5}, 5)])
@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5", "bart"])
def test_a_decoder_with_random_weights_begins_with_a_token(
    model_type: str, given: dict[str, Any], start: int, t5_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sizes = {f"{half}_{key}": 1 for half in ("encoder", "decoder") for key in ("layers", "ffn_dim", "attention_heads")}
    config = {"model_type": model_type, "d_model": 8} | (sizes if model_type == "bart" else SMALL) | given
    section = ModelSection(config=config, tokenizer="austen-llama")
    model = build_model(section, t5_tokenizer, None, architecture="encoder-decoder")
    expected = 2 if model_type == "bart" and not given else start  # BART's own
    assert model.config.decoder_start_token_id == expected
    loss = model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[4, 3]])).loss
    assert torch.isfinite(loss)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert expected in {again.config.decoder_start_token_id, again.generation_config.decoder_start_token_id}


@pytest.mark.parametrize(
    ("make", "data_format", "text"),
    [
        (ViTConfig, "text", "a vit is not one: it is made for images (ViTForImageClassification)"),
        (Wav2Vec2Config, "text", "a wav2vec2 is not one: it is made for speech by CTC (Wav2Vec2ForCTC)"),
        (T5Config, "text", "it cannot be trained with format text; allowed: completion, classification"),
        (BertConfig, "completion", "it cannot be trained with format completion; allowed: text, classif"),
        (ViTConfig, "classification", "no model of the type vit can classify texts"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(make: Callable[[], Any], data_format: str, text: str) -> None:
    with pytest.raises(DataError) as caught:
        find_architecture(make().to_dict(), data_format)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
