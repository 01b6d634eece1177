"""Tokenise prompts of held-out rows as at inference, with the answers in the data.

A completion's prompt is tokenised alone: with the special tokens that the tokenizer puts before a text, without those
after it. A conversation is written up to the assistant's last message, with the template used for training, which then
adds the header of the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import Rows, read_texts
from sparsebp_cli.source.conversation import Conversation, read_talks
from sparsebp_cli.source.reader import Row
from sparsebp_cli.worker.chat_encoding import find_template
from sparsebp_cli.worker.chat_template import ChatRequest, render_chats
from sparsebp_cli.worker.encoding import EncodedExample, Surrounding, call_tokenizer


@dataclass(frozen=True)
class Prompt:
    """A model's input, and the expected answer."""

    ids: np.ndarray  # int64
    text: str
    reference: str
    row: Row
    ends: frozenset[int] = frozenset()  # special tokens that end an answer in the training examples


@dataclass(frozen=True)
class HeldOutPrompts:
    """The prompts of both held-out splits, and those for the saved model."""

    validation: Sequence[Prompt] = ()
    test: Sequence[Prompt] = ()
    find_asked: Callable[[], Sequence[Prompt]] = tuple


def make_prompts(
    rows: Rows, examples: Sequence[EncodedExample], section: DatasetSection, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return the prompts of the rows from which examples were made, in their order. Raise DataError for a row without a
    prompt or an answer."""
    chosen = [rows[example.document] for example in examples]
    conversations = read_talks(chosen, section)
    if not chosen:
        return []
    if conversations is None:
        return _of_texts(chosen, examples, section, tokenizer)
    for one in conversations:
        if find_answer(one) is None:
            raise DataError(f"{one.place}: measure.generate needs a prompt before an answer of the assistant")
    return _of_conversations(conversations, chosen, examples, section, tokenizer)


def find_answer(one: Conversation) -> int | None:
    """Return the index of the message that answers the prompt; None if there is no such text."""
    last = one.num_given or one.last_of_assistant
    is_asked = 0 < last < len(one.messages) and isinstance(one.messages[last].get("content"), str)
    return last if is_asked else None


def _of_texts(
    chosen: Rows, examples: Sequence[EncodedExample], section: DatasetSection, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    texts = read_texts(chosen, section.column("prompt"), may_be_empty=True)
    references = read_texts(chosen, section.column("completion"))
    around = Surrounding.of(tokenizer)
    prompts = []
    encoded = call_tokenizer(tokenizer, texts)["input_ids"]
    for row, text, reference, all_ids, example in zip(chosen, texts, references, encoded, examples, strict=True):
        ids = all_ids if example.is_pair else all_ids[: len(all_ids) - around.num_behind]  # encoders read the end too
        if not ids:
            raise DataError(f"{row.place}: the prompt must have at least one token, got none")
        prompts.append(Prompt(np.array(ids, dtype=np.int64), text, reference, row))
    return prompts


def _of_conversations(
    conversations: Sequence[Conversation],
    rows: Rows,
    examples: Sequence[EncodedExample],
    section: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Prompt]:
    requests, references = [], []
    for one in conversations:
        last = find_answer(one)
        assert last is not None
        requests.append(ChatRequest(one.messages[:last], one.tools, generation_prompt=True))
        references.append(str(one.messages[last]["content"]))
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    rendered = render_chats(find_template(section, tokenizer), tokens, requests)
    for one, made in zip(conversations, rendered, strict=True):
        if made.error:
            raise DataError(f"{one.place}: the chat template refuses the prompt: {made.error}")
    encoded = call_tokenizer(tokenizer, [made.text for made in rendered], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    found = zip(encoded, rendered, references, rows, examples, strict=True)
    return [
        Prompt(np.array(ids, dtype=np.int64), made.text, reference, row, _find_end(example, special))
        for ids, made, reference, row, example in found
    ]


def _find_end(example: EncodedExample, special: set[int]) -> frozenset[int]:
    """Return the special token that ends a turn. Templates may use one that a base model's config does not name."""
    ends = [int(token) for token in example.labels if int(token) in special]
    return frozenset(ends[-1:])
