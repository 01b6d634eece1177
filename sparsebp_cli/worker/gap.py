"""Mask tokens (gaps) in packed text for masked language models.

Jacob Devlin, Ming-Wei Chang, Kenton Lee, Kristina Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers",
2019, https://aclanthology.org/N19-1423, section 3.1: 15 % of the tokens are predicted. Of these, 80 % are replaced by
the mask token, 10 % by a random one, and 10 % stay.
As in RoBERTa and in transformers' ``DataCollatorForLanguageModeling``, training examples get new masks at each visit.
Ours depend only on the seed and the position in the order, so a resumed run sees the same masks. Masks of held-out
examples never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import Rows
from sparsebp_cli.worker.encoding import IGNORED, EncodedExample, EncodedSplit, encode_text

# BERT's fractions. See decision 76.
PREDICTED, MASKED, RANDOM = 0.15, 0.8, 0.1  # of all tokens; of the predicted tokens


def encode_gaps(rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase) -> EncodedSplit:
    """Pack texts as for a causal model. Every token that is not special gets a label, until masks are drawn, except the
    first of a block, which no batch counts."""
    found = encode_text(rows, section, tokenizer, ())
    special = np.array(sorted(tokenizer.all_special_ids), dtype=np.int64)
    for number, example in enumerate(found.examples):
        is_fixed = np.isin(example.input_ids, special)
        is_fixed[0] = True
        found.examples[number] = replace(example, labels=np.where(is_fixed, IGNORED, example.input_ids))
    return found


@dataclass(frozen=True)
class Gaps:
    """Draws masks in the examples of one tokenizer."""

    mask_token_id: int
    num_tokens: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Gaps:
        """Return masks for the tokenizer's mask token. Raise DataError if it has none."""
        if not isinstance(tokenizer.mask_token_id, int):
            raise DataError("a masked language model needs a tokenizer with a mask token; this tokenizer has none")
        return cls(tokenizer.mask_token_id, len(tokenizer))

    def draw(self, example: EncodedExample, *key: object) -> EncodedExample:
        """Return an example with masks that depend only on the key. At least one token is masked, if any can be."""
        # A function of its key alone, such as seed and position, so that a resumed run needs no state. See decision 76.
        digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
        # Name the generator, because default_rng may be another one in a later NumPy.
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

    def draw_all(self, examples: Sequence[EncodedExample]) -> list[EncodedExample]:
        """Return examples with masks that depend only on their content."""
        return [self.draw(example, hashlib.sha256(example.input_ids.tobytes()).hexdigest()) for example in examples]
