"""Choose the encoder that makes examples from rows, by the recipe's format and the model's architecture."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.architecture import Architecture
from sparsebp_cli.source.column import Rows
from sparsebp_cli.source.conversation import read_talks
from sparsebp_cli.worker.chat_encoding import encode_chat
from sparsebp_cli.worker.encoding import EncodedSplit, encode_classification, encode_completion, encode_text
from sparsebp_cli.worker.gap import encode_gaps
from sparsebp_cli.worker.pair import encode_pairs

# Why an architecture has no use for columns that mark characters.
UNMARKED: dict[Architecture, str] = {
    "encoder-decoder": "an encoder-decoder reads two texts",
    "masked": "a masked language model draws the tokens to train at random",
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
    talks = None if architecture in UNMARKED else read_talks(rows, section)
    if columns and (why := UNMARKED.get(architecture) if talks is None else "the rows are conversations"):
        raise DataError(f"column {min(columns)!r} has character spans, but {why}: remove it from the policy")
    if talks is not None:
        return encode_chat(talks, section, tokenizer)
    if architecture == "encoder-decoder":
        return encode_pairs(rows, section, tokenizer)
    if architecture == "masked":
        return encode_gaps(rows, section, tokenizer)
    if section.format == "classification":
        return encode_classification(rows, section, tokenizer, label_names)
    encoder = encode_text if section.format == "text" else encode_completion
    return encoder(rows, section, tokenizer, columns)
