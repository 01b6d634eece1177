"""Choose the encoder that makes examples from rows, by the recipe's format and the model's architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.architecture import Architecture
from sparsebp_cli.source.column import Rows
from sparsebp_cli.source.conversation import holds_messages
from sparsebp_cli.worker.chat_encoding import encode_chat, encode_prompts
from sparsebp_cli.worker.encoding import (
    IGNORED,
    EncodedExample,
    EncodedSplit,
    encode_classification,
    encode_completion,
    encode_regression,
    encode_text,
)
from sparsebp_cli.worker.gap import encode_gaps
from sparsebp_cli.worker.pair import encode_pairs

Encoder = Callable[
    [Rows, DatasetSection, PreTrainedTokenizerBase, Collection[str], Sequence[str]],
    EncodedSplit,
]
ENCODERS: dict[str, Encoder] = {
    "text": encode_text,
    "completion": encode_completion,
    "chat": encode_chat,
    "classification": encode_classification,
    "regression": encode_regression,
}
NO_WEIGHT = "every token weighs 0"


def encode(
    rows: Rows,
    section: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Collection[str] = (),
    label_names: Sequence[str] = (),
    architecture: Architecture = "causal",
) -> EncodedSplit:
    """Return the examples of rows in the format of a recipe. ``columns`` names columns of character spans, which become
    token masks. ``label_names`` are the classes of a classification by number."""
    encoder = _choose(rows, section, architecture)
    found = encoder(rows, section, tokenizer, columns, label_names)
    _ignore_weightless(found)
    return found


def _choose(rows: Rows, section: DatasetSection, architecture: Architecture) -> Encoder:
    if architecture == "encoder-decoder":
        return encode_pairs
    if architecture == "masked":
        return encode_gaps
    if section.format == "completion" and holds_messages(rows, section.prompt_column):
        return encode_prompts
    return ENCODERS[section.format]


def _ignore_weightless(found: EncodedSplit) -> None:
    """Remove labels of tokens with weight 0, examples without other labels, and weights that are all 1."""
    if not any(LOSS_WEIGHT in example.columns for example in found.examples):
        return
    kept, block_rows = [], []
    for number, example in enumerate(found.examples):
        weight_T = example.columns.get(LOSS_WEIGHT, np.ones(len(example.labels)))
        labels = np.where(weight_T != 0, example.labels, IGNORED)
        if not (labels[1:] != IGNORED).any():
            found.dropped[NO_WEIGHT] += 1
            continue
        kept.append(_with_labels(example, labels, weight_T))
        block_rows += found.block_rows[number : number + 1]
    found.examples, found.block_rows = kept, block_rows


def _with_labels(example: EncodedExample, labels: np.ndarray, weight_T: np.ndarray) -> EncodedExample:
    columns = {name: column for name, column in example.columns.items() if name != LOSS_WEIGHT}
    if (weight_T[labels != IGNORED] != 1).any():
        columns[LOSS_WEIGHT] = weight_T
    return replace(example, labels=labels, columns=columns)
