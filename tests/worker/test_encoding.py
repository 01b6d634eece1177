"""Token ids and labels are those of transformers' and TRL's own paths, for tokenizers of many classes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding, LlamaConfig, LlamaForCausalLM

from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.worker.batch import collate
from sparsebp_cli.worker.encoding import COMPLETION_CUT, PROMPT_TOO_LONG, TEXT_CUT
from sparsebp_cli.worker.format import encode
from tests.tokenizers import DECODERS, ENCODERS, WORDS, build


def sentences(count: int, seed: int, longest: int = 24) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(WORDS, k=draw.randint(1, longest))) + draw.choice(["", ".", "!"]) for _ in range(count)
    ]


def classify(tokenizer: Any, texts: list[str], pairs: list[str] | None, length: int) -> Any:
    columns = {"text": texts, "label": ["good"] * len(texts)} | ({"pair": pairs} if pairs else {})
    rows = as_rows([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], "rows")
    section = DatasetSection(
        name="rows",
        format="classification",
        max_seq_length=length,
        columns={"text": ["text", "pair"]} if pairs else {},
    )
    return encode(rows, section, tokenizer, label_names=["bad", "good"])


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("with_pairs", [False, True], ids=["single", "pairs"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_classification_is_tokenised_as_run_glue_does(name: str, with_pairs: bool, padding_side: str) -> None:
    tokenizer = build(name, padding_side)
    texts, pairs = sentences(24, 1), sentences(24, 2) if with_pairs else None
    for length in (16, 400):  # some are cut, and none is
        found = classify(tokenizer, texts, pairs, length)
        features = [
            tokenizer(text, *([pairs[row]] if pairs else []), truncation=True, max_length=length)
            for row, text in enumerate(texts)
        ]
        wanted = DataCollatorWithPadding(tokenizer)(features)
        num_cut = sum(
            len(tokenizer(t, *([pairs[n]] if pairs else []))["input_ids"]) > length for n, t in enumerate(texts)
        )
        assert found.cut[TEXT_CUT] == num_cut
        assert bool(num_cut) == (length == 16)
        batch = collate(found.examples, tokenizer.pad_token_id)
        mask_BT = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        for row in range(len(texts)):
            kept, kept_there = mask_BT[row] == 1, wanted["attention_mask"][row] == 1
            assert batch["input_ids"][row, kept].tolist() == wanted["input_ids"][row, kept_there].tolist()
            if "token_type_ids" in wanted:
                types = batch.get("token_type_ids", torch.zeros_like(batch["input_ids"]))
                assert types[row, kept].tolist() == wanted["token_type_ids"][row, kept_there].tolist()
        assert batch["labels"].tolist() == [1] * len(texts)


def test_a_model_that_reads_the_class_at_the_end_is_padded_in_front() -> None:
    tokenizer = build("XLNet", "left")
    found = classify(tokenizer, sentences(8, 3), None, 64)
    batch = collate(found.examples, tokenizer.pad_token_id)
    assert (batch["input_ids"][:, -1] == tokenizer.cls_token_id).all()
    assert (batch["attention_mask"][:, -1] == 1).all()


def trl_rows(tokenizer: Any, rows: list[dict[str, str]], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and labels of TRL's SFTTrainer, cut as its collator does."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    options = SFTConfig(output_dir="unused", report_to=[], max_length=length, use_cpu=True, bf16=False)
    trainer = SFTTrainer(
        LlamaForCausalLM(config), options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    for row in trainer.train_dataset:
        yield row["input_ids"][:length], row["labels"][:length]


@pytest.fixture
def _in_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.filterwarnings("ignore")  # of TRL, about its own ways
@pytest.mark.parametrize("name", DECODERS)
def test_completions_are_tokenised_and_masked_as_trl_does(name: str) -> None:
    tokenizer, length = build(name), 40
    starts, ends = sentences(40, 4), sentences(40, 5)
    rows = [
        {"prompt": a + " " * (n % 3 > 0), "completion": b} for n, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]
    rows += [{"prompt": "go", "completion": "od film"}, {"prompt": "", "completion": "bad"}]  # a token over the border
    section = DatasetSection(name="rows", format="completion", max_seq_length=length)
    found = encode(as_rows(rows, "rows"), section, tokenizer)
    wanted = list(trl_rows(tokenizer, rows, length))  # without those that have no target, as here
    assert len(found.examples) == len(wanted)
    assert found.dropped[PROMPT_TOO_LONG] == len(rows) - len(wanted) > 0
    assert found.cut[COMPLETION_CUT] > 0
    for example, (ids, labels) in zip(found.examples, wanted, strict=True):
        assert example.input_ids.tolist() == ids
        assert example.labels.tolist() == labels


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_packed_text_is_the_stream_of_texts_as_trl_tokenises_them(name: str) -> None:
    tokenizer = build(name)
    rows = [{"text": text} for text in sentences(20, 6)]
    found = encode(as_rows(rows, "rows"), DatasetSection(name="rows", max_seq_length=8), tokenizer)
    stream = [i for ids, _ in trl_rows(tokenizer, rows, 10_000) for i in ids]
    assert np.concatenate([example.input_ids for example in found.examples]).tolist() == stream[: len(stream) // 8 * 8]
    assert found.left_over == len(stream) % 8


@pytest.mark.parametrize("name", ENCODERS)
def test_packed_text_of_other_models_is_surrounded_as_they_do_it(name: str) -> None:
    tokenizer = build(name)
    texts = sentences(20, 7)
    found = encode(
        as_rows([{"text": t} for t in texts], "rows"), DatasetSection(name="rows", max_seq_length=8), tokenizer
    )
    stream = [i for text in texts for i in tokenizer(text)["input_ids"]]
    assert np.concatenate([example.input_ids for example in found.examples]).tolist() == stream[: len(stream) // 8 * 8]


def test_an_empty_text_is_dropped_and_counted_and_rows_keep_their_numbers() -> None:
    rows = as_rows([{"text": text} for text in ["", "the film is good", "", "very bad", "the plot is boring"]], "rows")
    found = encode(rows, DatasetSection(name="rows", max_seq_length=8), build("GPT2"))
    assert dict(found.dropped) == {"the text is empty": 2}
    assert {example.document for example in found.examples} <= {1, 3, 4}
    assert found.block_rows[0][0] == 1
