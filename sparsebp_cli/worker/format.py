"""Choose the encoder that makes examples from rows, by the recipe's format and the model's architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedTokenizerBase

from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.architecture import Architecture
from sparsebp_cli.source.column import Rows
from sparsebp_cli.source.conversation import holds_messages
from sparsebp_cli.worker.chat_encoding import encode_chat, encode_prompts
from sparsebp_cli.worker.encoding import (
    EncodedSplit,
    encode_classification,
    encode_completion,
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
}


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
    return _choose(rows, section, architecture)(rows, section, tokenizer, columns, label_names)


def _choose(rows: Rows, section: DatasetSection, architecture: Architecture) -> Encoder:
    if architecture == "encoder-decoder":
        return encode_pairs
    if architecture == "masked":
        return encode_gaps
    if section.format == "completion" and holds_messages(rows, section.column("prompt")):
        return encode_prompts
    return ENCODERS[section.format]
