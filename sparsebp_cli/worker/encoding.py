"""Convert rows to token ids and labels, for each format of a recipe.

The model's own tokenizer adds the special tokens around a sequence: ``[CLS]`` and ``[SEP]``, a beginning of sequence,
or nothing. If it adds nothing after a text, an end of sequence is added, as in TRL's ``SFTTrainer``, so that a language
model learns where texts end. Labels of a classification are as in transformers' ``run_glue``, labels of a completion as
in TRL.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError, first_line
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import Rows, number_labels, read_column, read_texts
from sparsebp_cli.worker.token_mask import TextTokens, mask_tokens

IGNORED = -100  # the label that transformers' losses ignore

NUM_TAIL = 8  # number of last tokens to inspect

# Why a row gives no example, or loses a part. The data statistics count rows by these texts.
NO_TEXT = "the text is empty"
NO_COMPLETION = "the completion is empty"
PROMPT_TOO_LONG = "the prompt fills max_seq_length"
NO_TOKEN = "the text has no token"
COMPLETION_CUT = "the completion loses its end"
TEXT_CUT = "the text loses its end"


@dataclass(frozen=True)
class EncodedExample:
    """One tokenised example."""

    input_ids: np.ndarray  # int64, at most max_seq_length
    # int64, as long as input_ids, -100 where nothing is trained; or one class (0-d); for a pair, the decoder's output
    labels: np.ndarray
    # additional columns that policies read, by name, as long as input_ids
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    document: int = 0  # row of the dataset; for a packed block, the row with most of its tokens
    token_type_ids: np.ndarray | None = None  # int64, as long as input_ids; None if all are 0
    is_pair: bool = False  # whether an encoder reads input_ids and a decoder writes labels
    pads_left: bool = False  # whether padding is on the left: the model reads a text's class at its last position


@dataclass(frozen=True)
class Written:
    """The tokens of a row before anything was cut."""

    row: int
    text: str
    head: Sequence[int]  # its first tokens
    tails: Sequence[Sequence[int]]  # the last trained tokens of each turn, of the completion, or of the text

    @classmethod
    def of(cls, row: int, text: str, ids: Sequence[int]) -> Written:
        """Return the record of a row whose text is a single part."""
        return cls(row, text, ids[:2], [ids[-NUM_TAIL:]])


@dataclass
class EncodedSplit:
    """The examples of some rows, and what did not become part of an example."""

    examples: list[EncodedExample] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # rows without an example, by reason
    cut: Counter[str] = field(default_factory=Counter)  # rows whose example lacks tokens, by what is lost
    left_over: int = 0  # tokens of packed text after the last complete block
    # for each block of packed text, the numbers of the first and last row with a token in it
    block_rows: list[tuple[int, int]] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)  # one for each row that gave an example
    num_rows: int | None = None  # after a tail was cut: number of rows with a part here; None: all given rows


@dataclass(frozen=True)
class Surrounding:
    """The special tokens that a tokenizer adds around a single text."""

    num_before: int  # special tokens before it
    num_behind: int  # special tokens after it
    end: list[int]  # the end of sequence that we add if the tokenizer adds nothing after a text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Surrounding:
        """Determine it by a call, because tokenizers declare it in several ways and no attribute covers all."""
        plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
        whole = tokenizer("a", verbose=False)["input_ids"]
        starts = range(len(whole) - len(plain) + 1)
        before = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
        behind = len(whole) - before - len(plain)
        # See decision 76.
        end = [] if behind or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return cls(before, behind, end)


def encode_text(
    rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase, columns: Collection[str]
) -> EncodedSplit:
    """Pack texts into blocks of ``max_seq_length`` tokens. Each text has the tokenizer's special tokens."""
    found, length, around = EncodedSplit(), section.max_seq_length, Surrounding.of(tokenizer)
    texts = read_texts(rows, section.column("text"), may_be_empty=True)
    kept = [number for number, text in enumerate(texts) if text]
    if empty := len(texts) - len(kept):
        found.dropped[NO_TEXT] = empty
    tokens = _tokenize(tokenizer, [texts[number] for number in kept], with_offsets=bool(columns))
    documents = [_with_end(ids, around.end) for ids in tokens["input_ids"]]
    blocks = _blocks(documents, length)
    found.left_over = sum(map(len, documents)) - blocks.size
    owners = np.repeat(kept, [len(ids) for ids in documents])[: blocks.size].reshape(blocks.shape)
    some = [rows[number] for number in kept]
    marked = _mark(some, [texts[number] for number in kept], documents, tokens, around, columns)
    marked_blocks = {name: _blocks(masks, length) for name, masks in marked.items()}
    found.written = [Written.of(number, texts[number], ids) for number, ids in zip(kept, documents, strict=True)]
    found.block_rows = [(int(owner[0]), int(owner[-1])) for owner in owners]
    found.examples = [
        EncodedExample(
            block, block, {name: of_name[number] for name, of_name in marked_blocks.items()}, _most_common(owner)
        )
        for number, (block, owner) in enumerate(zip(blocks, owners, strict=True))
    ]
    return found


def encode_completion(
    rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase, columns: Collection[str]
) -> EncodedSplit:
    """Tokenise each prompt together with its completion, as a model sees them, and ignore the tokens that it shares
    with the prompt alone. Tokens beyond ``max_seq_length`` are cut from the end, the end of sequence first."""
    found, around = EncodedSplit(), Surrounding.of(tokenizer)
    prompts, completions = (read_texts(rows, name, may_be_empty=True) for name in section.read_columns)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    prompt_ids = _tokenize(tokenizer, prompts)["input_ids"]
    tokens = _tokenize(tokenizer, texts, with_offsets=bool(columns))
    whole = [_with_end(ids, around.end) for ids in tokens["input_ids"]]
    marked = _mark(rows, texts, whole, tokens, around, columns)
    for number, (prompt, all_ids) in enumerate(zip(prompt_ids, whole, strict=True)):
        if not completions[number]:
            found.dropped[NO_COMPLETION] += 1
            continue
        ids = np.array(all_ids[: section.max_seq_length], dtype=np.int64)
        labels = ids.copy()
        labels[: _common_length(prompt, all_ids)] = IGNORED
        if not (labels[1:] != IGNORED).any():
            found.dropped[PROMPT_TOO_LONG] += 1
            continue
        if len(ids) < len(all_ids):
            found.cut[COMPLETION_CUT] += 1
        of_row = {name: masks[number][: len(ids)] for name, masks in marked.items()}
        found.examples.append(EncodedExample(ids, labels, of_row, number))
        found.written.append(Written.of(number, texts[number], all_ids))
    return found


def encode_classification(
    rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
) -> EncodedSplit:
    """Tokenise each text, or pair of texts. If it exceeds ``max_seq_length``, the tokenizer cuts text and keeps its
    special tokens."""
    numbers = number_labels(rows, section.column("label"), label_names)
    labels = [np.array(number, dtype=np.int64) for number in numbers]
    found = EncodedSplit()
    texts, *others = (read_texts(rows, name) for name in section.read_columns)
    pairs = others[0] if others else None
    tokens = _tokenize(tokenizer, texts, pairs)
    types = tokens.get("token_type_ids") or itertools.repeat([])
    for number, (ids, types_of_one, class_) in enumerate(zip(tokens["input_ids"], types, labels, strict=False)):
        if len(ids) > section.max_seq_length:
            found.cut[TEXT_CUT] += 1
            pair = None if pairs is None else pairs[number]
            shorter = call_tokenizer(tokenizer, texts[number], pair, truncation=True, max_length=section.max_seq_length)
            ids, types_of_one = shorter["input_ids"], shorter.get("token_type_ids") or []  # noqa: PLW2901
        if not ids:
            found.dropped[NO_TOKEN] += 1
            continue
        found.written.append(
            Written(number, texts[number] + ("" if pairs is None else f" {pairs[number]}"), ids[:2], [])
        )
        type_ids = np.array(types_of_one, dtype=np.int64) if any(types_of_one) else None
        found.examples.append(
            EncodedExample(
                np.array(ids, dtype=np.int64),
                class_,
                document=number,
                token_type_ids=type_ids,
                pads_left=ids[-1] == tokenizer.cls_token_id,  # XLNet
            )
        )
    return found


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str] | None = None, *, with_offsets: bool = False
) -> Mapping[str, Any]:
    """Call the tokenizer as a user would, with its special tokens and without truncation."""
    if not texts:
        return {"input_ids": [], "offset_mapping": []}
    if with_offsets and not tokenizer.is_fast:
        raise DataError(f"a policy's column of character spans needs a fast tokenizer, got {type(tokenizer).__name__}")
    return call_tokenizer(tokenizer, texts, pairs, return_offsets_mapping=with_offsets)


def call_tokenizer(tokenizer: PreTrainedTokenizerBase, *texts: object, **options: object) -> Mapping[str, Any]:
    """Call a tokenizer on texts of the data. Raise DataError if its own pattern fails on them."""
    try:
        found: Mapping[str, Any] = tokenizer(*texts, verbose=False, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's error is not an Exception and has no public name
            raise
        text = f"the tokenizer cannot split these texts: its pattern fails or takes too long ({first_line(error)})"
        raise DataError(text) from None
    return found


def _with_end(ids: list[int], end: list[int]) -> list[int]:
    return ids if ids[-1:] == end else [*ids, *end]


def _mark(
    rows: Rows,
    texts: Sequence[str],
    whole: Sequence[Sequence[int]],
    tokens: Mapping[str, Any],
    around: Surrounding,
    columns: Collection[str],
) -> dict[str, list[np.ndarray]]:
    """Return token masks for each column of character spans, for each text."""
    if not columns:
        return {}
    of_texts = [
        TextTokens(
            len(text), offsets[around.num_before : len(offsets) - around.num_behind], around.num_before, len(ids)
        )
        for text, offsets, ids in zip(texts, tokens["offset_mapping"], whole, strict=True)
    ]
    return {name: mask_tokens(of_texts, rows, read_column(rows, name), name) for name in columns}


def _blocks(parts: Sequence[Sequence[int]] | Sequence[np.ndarray], length: int) -> np.ndarray:
    kind = parts[0].dtype if len(parts) and isinstance(parts[0], np.ndarray) else np.int64
    stream = np.array([i for part in parts for i in part], dtype=kind)
    return stream[: len(stream) // length * length].reshape(-1, length)


def _most_common(values: np.ndarray) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share. A token that spans the border of prompt and completion
    belongs to the completion."""
    both = zip(first, second, strict=False)
    return next((number for number, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))
