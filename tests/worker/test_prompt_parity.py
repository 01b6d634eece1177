"""A model is asked in the tokens that it was trained on, or the recipe says that it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sparsebp_cli.cli.starter.template import fill
from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.census import find_warnings
from sparsebp_cli.source import bundled
from sparsebp_cli.worker.data import Data, build_data

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


def _build(folder: Path, rows: list[dict[str, Any]], **section: Any) -> Data:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"name": str(folder / "rows.jsonl"), "max_seq_length": 64, "eval_fraction": 0.34} | section
    return build_data(DatasetSection(**values), AutoTokenizer.from_pretrained(bundled.austen_llama()))


def _chats(folder: Path, template: str, **section: Any) -> Data:
    (folder / "chat.jinja").write_text(template)
    rows = [
        {"messages": [{"role": "user", "content": f"Capital of {one}?"}, {"role": "assistant", "content": other}]}
        for one, other in CAPITALS.items()
    ]
    return _build(folder, rows, format="chat", chat_template=str(folder / "chat.jinja"), **section)


def test_the_template_that_init_writes_asks_in_the_tokens_of_training(tmp_path: Path) -> None:
    data = _chats(tmp_path, fill("folder/chat.jinja"))
    found = [split["texts"] for split in data.census["splits"].values()]
    assert [texts["affected"] for texts in found] == [0, 0]
    assert sum(texts["prompts"] for texts in found) == sum(texts["turns"] for texts in found) == len(CAPITALS)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_a_generation_prompt_that_ends_in_a_blank_is_refused_with_the_cure(tmp_path: Path, train_on: str) -> None:
    template = fill("folder/chat.jinja").replace("':\\n'", "': '").replace("'assistant:\\n'", "'assistant: '")
    with pytest.raises(DataError, match=r"4 of 4 prompts are tokenised differently in generation than in training"):
        _chats(tmp_path, template, train_on=train_on)
    with pytest.raises(DataError, match=r"which ends in '.*assistant: '\): move the blank at the end"):
        _chats(tmp_path, template, train_on=train_on)


def test_most_prompts_with_a_blank_at_their_end_are_refused_and_few_are_named(tmp_path: Path) -> None:
    good = [{"prompt": f"Capital of {one}:\n", "completion": other} for one, other in CAPITALS.items()]
    bad = [{"prompt": f"Capital of {one}: ", "completion": other} for one, other in CAPITALS.items()]
    with pytest.raises(DataError, match=r"rows\.jsonl, line \d+, which ends in '.*: '"):
        _build(tmp_path, bad, format="completion")
    data = _build(tmp_path, [*good, *good, bad[0]], format="completion", eval_split="train")
    warned = [
        text for level, text in find_warnings(data.census) if level == "warning" and "tokenised differently" in text
    ]
    assert len(warned) == 2
    assert any("data: validation: 1 of 13 prompts are tokenised differently" in text for text in warned)


def test_a_row_without_an_answer_to_ask_for_is_not_compared(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]}
    first = {"messages": [{"role": "assistant", "content": "Good day"}, {"role": "user", "content": "Hello"}]}
    (tmp_path / "chat.jinja").write_text(fill("folder/chat.jinja"))
    rows = [asked, first] * 3
    section = {"format": "chat", "chat_template": str(tmp_path / "chat.jinja"), "eval_split": "train"}
    data = _build(tmp_path, rows, **section)
    found = data.census["splits"]["train"]["texts"]
    assert (found["prompts"], found["affected"]) == (3, 0)
