"""The page on your own data: each of its rows becomes the tokens that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

from sparsebp_cli.cli.starter.template import fill
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.data_preview import show_first
from sparsebp_cli.worker.model import build_tokenizer, read_architecture
from tests.docs.block import ROOT

PAGE = (ROOT / "docs" / "guide" / "own-data.md").read_text(encoding="utf-8")
CASE = re.compile(r"```json\n(.*?)```\n\n```yaml\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
CASES = CASE.findall(PAGE)


def write_bert(folder: Path) -> None:
    """Write config and tokenizer of a tiny BERT, which puts [CLS] and [SEP] around texts as the real one does."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "kind", "word", "very"]
    words_to_ids = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordPiece(words_to_ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **special).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=len(words), **sizes).save_pretrained(folder)


def show(example: dict[str, object]) -> str:
    parts: list[tuple[str, bool]] = example["parts"]  # type: ignore[assignment]
    text = "".join(f"[[{text}]]" if is_trained else text for text, is_trained in parts)
    return f"{text} -> {example['label']}" if "label" in example else text


@pytest.mark.parametrize(("rows", "section", "shown"), CASES, ids=[f"example {n}" for n in range(1, len(CASES) + 1)])
def test_a_row_becomes_the_tokens_that_the_page_shows(
    rows: str, section: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text(rows)
    (tmp_path / "chat.jinja").write_text(fill("folder/chat.jinja"))
    model = "austen-llama"
    if "[CLS]" in shown:
        write_bert(tmp_path / "bert")
        model = str(tmp_path / "bert")
    (tmp_path / "shown.yaml").write_text(f"version: 1\nmodel: {{name: {model}}}\n{section}")
    recipe = load_recipe(tmp_path / "shown.yaml")
    name = str(tmp_path / recipe.dataset.name)
    dataset = recipe.dataset.model_copy(update={"name": name})
    tokenizer = build_tokenizer(recipe.model)
    data = build_data(dataset, tokenizer, (), read_architecture(recipe.model, dataset.format))
    assert "\n".join(show(example) for example in show_first(data, tokenizer)["train"]) + "\n" == shown


def test_the_page_has_an_example_of_every_kind_of_format() -> None:
    formats = {re.search(r"format: (\w+)", section)[1] for _, section, _ in CASES}  # type: ignore[index]
    assert formats == {"text", "completion", "chat", "classification"}
    assert len(CASES) == PAGE.count("```json\n")
