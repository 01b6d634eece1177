"""Ask a saved model the first held-out prompts with plain transformers, as its user will.

The loss does not show what a model answers. If prompts are tokenised differently than in training, the loss is small
but the answers are useless. So a run ends by querying the saved folder, and shows prompt, reference and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.journal import UNENDED
from sparsebp_cli.source.column import Rows
from sparsebp_cli.worker.encoding import EncodedExample
from sparsebp_cli.worker.generation import MOST_CHARACTERS, MOST_SAMPLES
from sparsebp_cli.worker.prompt import Prompt, make_prompts

MOST_TOKENS = 64  # largest length of an answer
MORE_TOKENS = 8  # additional tokens beyond the longest reference


def find_questions(
    rows: Rows, examples: Sequence[EncodedExample], section: DatasetSection, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return the first prompts of the held-out rows; none if the format has no prompts or a row has no answer."""
    if section.format not in ("completion", "chat"):
        return []
    try:
        return make_prompts(rows, examples[:MOST_SAMPLES], section, tokenizer)
    except DataError:  # such as a conversation whose last turn calls a tool
        return []


@torch.no_grad()
def ask(model: nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Prompt]) -> dict[str, list[str]]:
    """Return prompts, references and the greedy answers of a loaded model, with its own end tokens.

    An answer may have 8 tokens more than its reference, at most 64. An answer without an end is marked.
    """
    answers = list[str]()
    inner: Any = model.eval()
    for question in questions:
        reference = tokenizer(question.reference, add_special_tokens=False)["input_ids"]
        most = min(MOST_TOKENS, len(reference) + MORE_TOKENS)
        ids_1T = torch.from_numpy(question.ids)[None].to(next(model.parameters()).device)
        made_1T = inner.generate(
            input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, num_beams=1, max_new_tokens=most
        )
        new_T = made_1T[0] if inner.config.is_encoder_decoder else made_1T[0, ids_1T.shape[1] :]
        text = str(tokenizer.decode(new_T, skip_special_tokens=True))[:MOST_CHARACTERS]
        answers.append(text if _has_ended(inner, new_T, most) else f"{text} ... ({most} {UNENDED}")
    return {
        "prompt": [question.text[-MOST_CHARACTERS:] for question in questions],
        "reference": [question.reference[:MOST_CHARACTERS] for question in questions],
        "prediction": answers,
    }


def _has_ended(model: Any, new_T: torch.Tensor, most: int) -> bool:
    end = model.generation_config.eos_token_id
    return len(new_T) < most or int(new_T[-1]) in (end if isinstance(end, list) else [end])
