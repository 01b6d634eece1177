"""Encode examples for an encoder and a decoder: the encoder reads the prompt, the decoder writes the completion."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import Rows, read_texts
from sparsebp_cli.worker.encoding import (
    COMPLETION_CUT,
    NO_COMPLETION,
    EncodedExample,
    EncodedSplit,
    Written,
    call_tokenizer,
)

PROMPT_CUT = "the prompt loses its end"


def encode_pairs(rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase) -> EncodedSplit:
    """Tokenise each prompt, and each completion as a target, with the tokenizer's special tokens for either, as in
    transformers' ``run_translation``. Each has at most ``max_seq_length`` tokens."""
    if section.train_on == "all":
        text = "train_on must be assistant: an encoder-decoder does not predict prompts; got all"
        raise DataError(text)
    prompts, completions = (read_texts(rows, name, may_be_empty=True) for name in section.read_columns)
    length, found = section.max_seq_length, EncodedSplit()
    if not prompts:
        return found
    sources = call_tokenizer(tokenizer, prompts)["input_ids"]
    targets = call_tokenizer(tokenizer, text_target=completions)["input_ids"]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if not completions[number]:
            found.dropped[NO_COMPLETION] += 1
            continue
        found.written.append(Written.of(number, f"{prompts[number]} {completions[number]}", target))
        if len(source) > length:
            found.cut[PROMPT_CUT] += 1
            source = call_tokenizer(tokenizer, prompts[number], truncation=True, max_length=length)["input_ids"]  # noqa: PLW2901
        if len(target) > length:
            found.cut[COMPLETION_CUT] += 1
            cut = call_tokenizer(tokenizer, text_target=completions[number], truncation=True, max_length=length)
            target = cut["input_ids"]  # noqa: PLW2901
        source_ids, labels = np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)
        found.examples.append(EncodedExample(source_ids, labels, document=number, is_pair=True))
    return found
