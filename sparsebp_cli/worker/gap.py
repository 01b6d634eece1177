"""Gaps in packed text for masked language models.

Jacob Devlin, Ming-Wei Chang, Kenton Lee, Kristina Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers",
2019, https://aclanthology.org/N19-1423, section 3.1: 15 % of the tokens are predicted, of which 80 % are replaced by
the mask token, 10 % by a random one, and 10 % stay. As in RoBERTa and in transformers'
``DataCollatorForLanguageModeling``, training examples have other gaps each time they are visited; ours follow from the
seed and the place in the order alone, so that a resumed run sees the same. Held-out examples always have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import Rows
from sparsebp_cli.worker.encoding import IGNORED, Encoded, Example, encode_text

# BERT's. See decision 76.
PREDICTED, MASKED, RANDOM = 0.15, 0.8, 0.1  # of the tokens; of the predicted ones


def encode_gaps(
    rows: Rows,
    section: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Collection[str],
    label_names: Sequence[str],
) -> Encoded:
    """Pack texts as for a causal model; every token that is not special has a label, until gaps are drawn, but for the
    first of a block, which no batch counts."""
    if columns or section.weight_column is not None:
        name = min(columns) if columns else section.weight_column
        raise DataError(f"column {name!r} marks tokens to be trained, and a masked language model draws its own")
    found = encode_text(rows, section, tokenizer, columns, label_names)
    special = np.array(sorted(tokenizer.all_special_ids), dtype=np.int64)
    for number, example in enumerate(found.examples):
        is_fixed = np.isin(example.input_ids, special)
        is_fixed[0] = True
        found.examples[number] = replace(example, labels=np.where(is_fixed, IGNORED, example.input_ids))
    return found


@dataclass(frozen=True)
class Gaps:
    """Draws gaps in the examples of one tokenizer."""

    mask_token_id: int
    num_tokens: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Gaps:
        """Take the tokenizer's mask token. Raise DataError if it has none."""
        if not isinstance(tokenizer.mask_token_id, int):
            raise DataError("a masked language model needs a tokenizer with a mask token, which this one has not")
        return cls(tokenizer.mask_token_id, len(tokenizer))

    def draw(self, example: Example, *key: object) -> Example:
        """Return an example with gaps that follow from the key: at least one, if it has a token that may be one."""
        # A function of its key alone, such as seed and place: a resumed run needs no state. See decision 76.
        digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
        # By name: default_rng may be another generator in a later NumPy.
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
        may_be = np.flatnonzero(example.labels != IGNORED)
        if not len(may_be):
            return example
        is_gap = generator.random(len(may_be)) < PREDICTED
        if not is_gap.any():
            is_gap[generator.integers(len(may_be))] = True
        places = may_be[is_gap]
        ids, labels = example.input_ids.copy(), np.full_like(example.labels, IGNORED)
        labels[places] = example.labels[places]
        how = generator.random(len(places))
        drawn = generator.integers(self.num_tokens, size=len(places))
        stays = how >= MASKED + RANDOM
        ids[places] = np.where(how < MASKED, self.mask_token_id, np.where(stays, ids[places], drawn))
        return replace(example, input_ids=ids, labels=labels)

    def draw_all(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples with gaps that follow from their content."""
        return [self.draw(example, hashlib.sha256(example.input_ids.tobytes()).hexdigest()) for example in examples]
