"""Print the data of a plan for ``sparsebp data``: statistics and first examples, without loading weights.

``python -m sparsebp_cli.worker.data_preview FOLDER/plan.json`` prints them as JSON: ``{"splits": ..., "shared": ...,
"warnings": [[level, text]], "first": {split: [{"ids": [...], "tokens": [...], "trained": [...], "parts": [[text,
trained]]}]}}``, or ``{"error": text, "code": exit code}``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.known_kind import find_columns
from sparsebp_cli.run.census import find_warnings
from sparsebp_cli.worker.answer import answer
from sparsebp_cli.worker.census import flatten
from sparsebp_cli.worker.data import Data, build_data
from sparsebp_cli.worker.encoding import EncodedExample
from sparsebp_cli.worker.model import build_tokenizer, read_architecture, read_head
from sparsebp_cli.worker.policy import make_policies

NUM_SHOWN = 3  # examples of each split


def show_first(data: Data, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[dict[str, object]]]:
    """Return the first examples of each split, as they are trained and as readable text."""
    train = data.train[:NUM_SHOWN]
    if data.gaps is not None:  # every visit draws other masks
        train = data.gaps.draw_all(train)
    splits = {"train": train, "validation": data.held_out, "test": data.test}
    return {
        name: [_show(example, data.label_names, tokenizer) for example in examples[:NUM_SHOWN]]
        for name, examples in splits.items()
        if examples
    }


def _show(example: EncodedExample, label_names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    all_ids, mask = flatten(example)
    ids = all_ids.tolist()
    borders = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    # Decode from the start up to each border, because some tokenizers drop a leading blank of separately decoded text.
    texts = [str(tokenizer.decode(ids[:border], clean_up_tokenization_spaces=False)) for border in borders]
    parts = [
        [text[len(before) :] if text.startswith(before) else str(tokenizer.decode(ids[start:end])), bool(mask[start])]
        for before, text, start, end in zip(texts, texts[1:], borders, borders[1:], strict=False)
    ]
    shown: dict[str, object] = {"ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids), "trained": mask.tolist()}
    shown |= {"parts": parts}
    return shown if example.labels.ndim or example.is_pair else shown | {"label": label_names[int(example.labels)]}


def take_census(plan_file: Path) -> dict[str, object]:
    """Read and tokenise the data of a plan, and return its statistics and first examples."""
    recipe = Plan.load(plan_file).recipe
    tokenizer = build_tokenizer(recipe.model)
    columns = find_columns(make_policies(recipe))
    architecture = read_architecture(recipe.model, recipe.dataset.format)
    head = read_head(recipe.model, recipe.dataset.format)
    data = build_data(recipe.dataset, tokenizer, columns, architecture, head=head)
    return {**data.census, "warnings": list(find_warnings(data.census)), "first": show_first(data, tokenizer)}


if __name__ == "__main__":
    sys.exit(answer(lambda: take_census(Path(sys.argv[1]))))
