"""Templates of the usual model families ask in the tokens of training, whatever the kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.source.reader import Row
from sparsebp_cli.worker import chat, prompt
from sparsebp_cli.worker.chat_template import ChatRequest, RenderedChat, render_chats
from sparsebp_cli.worker.encoding import EncodedSplit
from sparsebp_cli.worker.format import encode
from sparsebp_cli.worker.text_check import check_texts

FOLDER = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# Each template with its special tokens, and the key of a message that holds reasoning.
FAMILIES: dict[str, tuple[str, list[str], str | None]] = {
    "ChatML": (CHATML, ["<|im_start|>", "<|im_end|>"], None),
    "Llama 2": (LLAMA_2, [], None),
    "Llama 3": ("llama3.jinja", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], None),
    "Gemma": ("gemma.jinja", ["<start_of_turn>", "<end_of_turn>"], None),
    "Mistral": (MISTRAL, ["[INST]", "[/INST]"], None),
    "Phi": ("phi3.jinja", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], None),
    "Qwen with thinking": ("qwen3.jinja", ["<|im_start|>", "<|im_end|>"], "reasoning_content"),
    "GPT-OSS": (
        "gptoss.jinja",
        ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
        "thinking",
    ),
}
# How Llama 3 and later models divide texts into words: line breaks stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
KINDS = ("byte-level BPE", "Unigram", "WordPiece")
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


def read(family: str) -> str:
    given = FAMILIES[family][0]
    return (FOLDER / given).read_text() if given.endswith(".jinja") else given


@cache
def make_tokenizer(kind: str, family: str) -> PreTrainedTokenizerFast:
    """Train a small tokenizer on a few sentences and the family's own words."""
    special = ["<unk>", "<s>", "</s>", *FAMILIES[family][1]]
    words = [
        "What is the capital of",
        "The capital is",
        "user assistant system model final analysis\n",
        "\n\n",
        " . ? !",
    ]
    corpus = [*words, *(f"{one}? {other}." for one, other in CAPITALS.items())] * 3
    trainer: Any
    if kind.startswith("byte-level BPE"):
        made = Tokenizer(models.BPE())
        of_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        split = pre_tokenizers.Split(Regex(WORDS), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = of_gpt2 if kind.endswith("GPT-2") else pre_tokenizers.Sequence([split, bytes_only])
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "Unigram":
        made = Tokenizer(models.Unigram())
        # As in SentencePiece, a line break is a piece of its own.
        parts = [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
        made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(parts), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    made.train_from_iterator(corpus, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=FAMILIES[family][1], **names)


@cache
def _render(template: str, names: str, requests: str) -> list[RenderedChat]:
    return render_chats(template, json.loads(names), [ChatRequest(*one) for one in json.loads(requests)])


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render each conversation once for all tokenizers: a template does not see them."""

    def render(template: str, tokens: Any, requests: Sequence[ChatRequest]) -> list[RenderedChat]:
        asked = [(one.messages, one.tools, one.generation_prompt) for one in requests]
        return _render(template, json.dumps(tokens), json.dumps(asked))

    monkeypatch.setattr(chat, "render_chats", render)
    monkeypatch.setattr(prompt, "render_chats", render)


def ask(family: str, *, as_prompts: bool) -> list[dict[str, Any]]:
    """Return rows of one question and answer, in half of them with reasoning where the family has it."""
    reasoning, rows = FAMILIES[family][2], []
    for number, (one, other) in enumerate(CAPITALS.items()):
        question = [{"role": "user", "content": f"What is the capital of {one}?"}]
        answer = {"role": "assistant", "content": f"{other}."}
        answer |= {reasoning: f"The capital of {one}"} if reasoning and number % 2 else {}
        rows.append({"prompt": question, "completion": [answer]} if as_prompts else {"messages": [*question, answer]})
    return rows


def make(family: str, kind: str, form: str, **more: Any) -> tuple[list[Row], EncodedSplit, DatasetSection]:
    section = DatasetSection(name="rows", format=form, chat_template=read(family), max_seq_length=512, **more)
    rows = as_rows(ask(family, as_prompts=form == "completion"), "rows, row")
    return rows, encode(rows, section, make_tokenizer(kind, family)), section


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_the_beginning_of_its_training_example(family: str, kind: str) -> None:
    for form in ("chat", "completion"):
        rows, found, section = make(family, kind, form)
        checked = check_texts(rows, found, section, make_tokenizer(kind, family))
        assert (checked["prompts"], checked["turns"]) == (len(CAPITALS), len(CAPITALS))
        assert checked["faults"] == [], form


def test_line_breaks_that_a_tokenizer_divides_in_training_alone_are_refused_by_name() -> None:
    kind = "byte-level BPE of GPT-2"
    rows, found, section = make("Llama 3", kind, "chat")
    with pytest.raises(
        DataError, match=r"6 of 6 prompts are tokenised differently .* at the end of a token, such as after"
    ):
        check_texts(rows, found, section, make_tokenizer(kind, "Llama 3"))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_texts_are_asked_in_the_tokens_of_training_or_refused(kind: str) -> None:
    tokenizer, refused = make_tokenizer(kind, "ChatML"), []
    section = DatasetSection(name="rows", format="completion")
    for border in ("\n", " "):
        texts = [{"prompt": f"The capital of {one}?{border}", "completion": other} for one, other in CAPITALS.items()]
        asked = [tokenizer(row["prompt"])["input_ids"] for row in texts]
        trained = [tokenizer(row["prompt"] + row["completion"])["input_ids"] for row in texts]
        unlike = sum(one != other[: len(one)] for one, other in zip(asked, trained, strict=True))
        rows = as_rows(texts, "rows, row")
        found = encode(rows, section, tokenizer)
        if unlike > len(texts) / 2:
            refused.append(border)
            with pytest.raises(
                DataError, match=rf"{unlike} of 6 prompts are tokenised differently .*move the blank at the"
            ):
                check_texts(rows, found, section, tokenizer)
        else:
            counted = check_texts(rows, found, section, tokenizer)["faults"]
            assert [fault["number"] for fault in counted] == [unlike] * bool(unlike)
    assert "\n" not in refused
    assert refused or kind != "byte-level BPE"
