"""Encode conversations as examples: tokens by the chat template, labels where an assistant is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT
from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.conversation import Conversation, read_template
from sparsebp_cli.worker.chat import ChatText, Span, mark_tokens, write_chats
from sparsebp_cli.worker.encoding import IGNORED, NUM_TAIL, EncodedExample, EncodedSplit, Written, call_tokenizer

NO_TURN = "the user or the assistant has no text"
NOTHING_TRAINED = "no message is trained"
TRAINED_CUT_OFF = "no trained message begins within max_seq_length"
CHAT_CUT = "the conversation loses its end"


def encode_chat(
    conversations: Sequence[Conversation], section: DatasetSection, tokenizer: PreTrainedTokenizerBase
) -> EncodedSplit:
    """Write each conversation by the chat template, and ignore the tokens that are not trained: of a prompt and a
    completion, the prompt. Text beyond ``max_seq_length`` is cut from the end."""
    if section.format == "completion" and section.train_on == "all":
        raise DataError("'train_on: all' with messages needs 'format: chat', got 'format: completion'")
    if not tokenizer.is_fast:
        raise DataError(f"format {section.format} of messages needs a fast tokenizer, got {type(tokenizer).__name__}")
    found, numbers = EncodedSplit(), [number for number, one in enumerate(conversations) if one.messages]
    if empty := len(conversations) - len(numbers):
        found.dropped[NO_TURN] = empty
    conversations = [conversations[number] for number in numbers]
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    texts = write_chats(conversations, find_template(section, tokenizer), tokens, section.train_on)
    # The template itself writes every special token.
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    encoded = call_tokenizer(tokenizer, [text.text for text in texts], **options) if texts else {}
    for place, (number, text) in enumerate(zip(numbers, texts, strict=True)):
        _add(found, number, text, (encoded["input_ids"][place], encoded["offset_mapping"][place]), section)
    return found


def _add(
    found: EncodedSplit,
    number: int,
    text: ChatText,
    tokens: tuple[Sequence[int], Sequence[tuple[int, int]]],
    section: DatasetSection,
) -> None:
    """Add the example of a row, or the reason why it has none."""
    all_ids, length = tokens[0], section.max_seq_length
    weight_T = mark_tokens(tokens[1], text.spans)
    # Nothing predicts the first token.
    if not (weight_T[1:] != 0).any():
        found.dropped[NOTHING_TRAINED] += 1
        return
    ids, weight_T = np.array(all_ids[:length], dtype=np.int64), weight_T[:length]
    if not (weight_T[1:] != 0).any():
        found.dropped[TRAINED_CUT_OFF] += 1
        return
    if len(ids) < len(all_ids):
        found.cut[CHAT_CUT] += 1
    labels = np.where(weight_T != 0, ids, IGNORED)
    given = {LOSS_WEIGHT: weight_T.astype(np.float32)} if set(weight_T) - {0.0, 1.0} else {}
    found.examples.append(EncodedExample(ids, labels, given, number))
    found.written.append(Written(number, text.text, all_ids[:2], _find_tails(all_ids, tokens[1], text.spans)))


def _find_tails(ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Sequence[int]]:
    """Return the last tokens of each trained part."""
    border_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    tails: list[Sequence[int]] = []
    for begin, end, weight in spans:
        inside = np.flatnonzero((border_T2[:, 0] < end) & (border_T2[:, 1] > begin))
        if weight and len(inside):
            tails.append(ids[max(inside[0], inside[-1] + 1 - NUM_TAIL) : inside[-1] + 1])
    return tails


def find_template(section: DatasetSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template: the recipe's, whose text the plan holds, or the tokenizer's own."""
    given = section.chat_template
    if given is not None:
        return read_template(given)
    own: object = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not isinstance(own, str) or not own:
        raise DataError("the tokenizer has no chat template: give dataset.chat_template, a file with one")
    return own
