"""Compare prompts as a generation sends them with the beginnings of the training examples.

An example is tokenised as one text, a prompt alone. If a prompt ends in a blank, many tokenizers merge it into the
answer's first token in training, but give it its own token at inference. The model then gets a prompt that it was never
trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.source.column import Rows
from sparsebp_cli.source.conversation import read_talks
from sparsebp_cli.worker.encoding import EncodedExample
from sparsebp_cli.worker.prompt import Prompt, find_answer, make_prompts


def compare_prompts(
    rows: Rows, examples: Sequence[EncodedExample], section: DatasetSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, list[Prompt]]:
    """Return the number of prompts, and the prompts whose tokens differ from the beginning of their example."""
    is_asked = section.format == "chat" or (section.format == "completion" and section.train_on == "assistant")
    if not is_asked or any(example.is_pair for example in examples):
        return 0, []  # an encoder reads its prompt separately in training too
    chosen = [rows[example.document] for example in examples]
    conversations = read_talks(chosen, section)
    if conversations is not None:
        answers = [find_answer(one) for one in conversations]
        examples = [example for example, answer in zip(examples, answers, strict=True) if answer is not None]
    prompts = make_prompts(rows, examples, section, tokenizer)
    return len(prompts), [
        prompt for prompt, example in zip(prompts, examples, strict=True) if _differs(prompt, example)
    ]


def _differs(prompt: Prompt, example: EncodedExample) -> bool:
    length = min(len(prompt.ids), len(example.input_ids))
    return not np.array_equal(prompt.ids[:length], example.input_ids[:length])
