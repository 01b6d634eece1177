"""Generate texts from held-out prompts, and compute their metrics.

Generation is greedy, so it draws no random numbers. It restores everything afterwards: the mode of each module, the
policies, the random generators (which a plug-in's metric may use), and the model's own generation settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sparsebp_cli.backward.patch.rewind import capture_rng, restore_rng
from sparsebp_cli.errors import DataError
from sparsebp_cli.metrics import find_text_metric
from sparsebp_cli.recipe.schema import GenerateSection
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.prompt import Prompt

MOST_SAMPLES = 3  # kept in the event log for each generation: the first prompts of the split
MOST_CHARACTERS = 500  # kept of each text: the end of a prompt, the beginning of an answer


@dataclass(frozen=True)
class Generator:
    """Generates texts with a model that is being trained."""

    model: nn.Module  # without wrappers
    tokenizer: PreTrainedTokenizerBase
    section: GenerateSection
    batch_size: int
    device: torch.device

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError, before training starts, if a metric lacks its library, the model cannot generate, or it has
        too few positions for a prompt and its answer."""
        for name in self.section.metrics:
            find_text_metric(name).require(name)
        inner = find_generating(self.model)
        if not inner.can_generate():
            raise DataError(f"measure.generate: a {type(inner).__name__} cannot generate text: leave this key out")
        most = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        longest = max(len(prompt.ids) for prompt in prompts)
        if inner.config.is_encoder_decoder or not isinstance(most, int):
            return
        if longest + self.section.max_new_tokens > most:
            raise DataError(
                f"measure.generate.max_new_tokens: {self.section.max_new_tokens} new tokens after a prompt of "
                f"{longest} tokens exceed the model's {most} positions: generate fewer tokens"
            )

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the model's answer to each prompt, without special tokens."""
        inner, found = find_generating(self.model), list[str]()
        settings = self._settings(inner, prompts)
        with _evaluating(self.model), _with_settings(inner, settings), torch.no_grad():
            for start in range(0, len(prompts), self.batch_size):
                some = prompts[start : start + self.batch_size]
                ids_BT, mask_BT = self._pad(some)
                made_BT = inner.generate(input_ids=ids_BT, attention_mask=mask_BT)  # type: ignore[operator]
                if not inner.config.is_encoder_decoder:
                    made_BT = made_BT[:, ids_BT.shape[1] :]
                found += self.tokenizer.batch_decode(made_BT, skip_special_tokens=True)
        return found

    def _settings(self, inner: PreTrainedModel, prompts: Sequence[Prompt]) -> GenerationConfig:
        """Return our own settings. A model's settings may sample, penalise repetitions or search beams, which would
        change the metrics. Only the tokens that begin and end a text come from the model."""
        own, pad = inner.generation_config, self.tokenizer.pad_token_id
        ends = {end for prompt in prompts for end in prompt.ends}
        for given in (getattr(own, "eos_token_id", None), self.tokenizer.eos_token_id):
            ends |= set(given) if isinstance(given, list) else set() if given is None else {given}
        # See decision 10.
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.section.max_new_tokens,
            use_cache=True,  # the model's config says false, for training
            pad_token_id=pad,
            eos_token_id=sorted(ends) or None,
            bos_token_id=getattr(own, "bos_token_id", None),
            decoder_start_token_id=getattr(own, "decoder_start_token_id", None),
        )

    def _pad(self, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return prompts padded on the left, so that answers follow directly, and their mask."""
        longest, pad = max(len(prompt.ids) for prompt in prompts), self.tokenizer.pad_token_id
        ids_BT = torch.full((len(prompts), longest), pad if isinstance(pad, int) else 0)
        mask_BT = torch.zeros((len(prompts), longest), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, longest - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
            mask_BT[row, longest - len(prompt.ids) :] = 1
        return ids_BT.to(self.device), mask_BT.to(self.device)


@dataclass(frozen=True)
class Generated:
    """The metrics of a generation, and its first texts."""

    values: dict[str, float]
    samples: dict[str, list[str]]  # ``prompt``, ``reference`` and ``prediction``
    scores: dict[str, list[float]]  # each prompt's score, for metrics that are means of these; empty if not requested


def measure_generated(
    generator: Generator,
    prompts: Sequence[Prompt],
    prefix: str,
    ranks: Ranks,
    precision: AbstractContextManager[object],
    *,
    each: bool = False,
) -> Generated:
    """Generate on all ranks, each a part of the prompts, and compute the metrics on the first rank, with ``each`` also
    for single prompts. Every rank returns them. Raise DataError on every rank if a metric fails."""
    size = -(-len(prompts) // ranks.count)
    own = prompts[ranks.rank * size : (ranks.rank + 1) * size]
    before = capture_rng()
    with precision:
        parts = ranks.gather(generator.generate(own) if own else [])
    values, scores, failure = dict[str, float](), dict[str, list[float]](), ""
    predictions = [text for part in parts for text in part]
    if ranks.is_first:
        try:
            values, scores = _compute(generator.section, prompts, predictions, prefix, each=each)
        except DataError as error:  # the other ranks wait for the result
            failure = str(error)
    restore_rng(before)
    values, scores, failure = ranks.broadcast((values, scores, failure))
    if failure:
        raise DataError(f"measure.generate: {failure}")
    shown = list(zip(prompts, predictions, strict=False))[:MOST_SAMPLES]
    samples = {
        "prompt": [prompt.text[-MOST_CHARACTERS:] for prompt, _ in shown],
        "reference": [prompt.reference[:MOST_CHARACTERS] for prompt, _ in shown],
        "prediction": [text[:MOST_CHARACTERS] for _, text in shown],
    }
    return Generated(values, samples, scores)


def _compute(
    section: GenerateSection, prompts: Sequence[Prompt], predictions: Sequence[str], prefix: str, *, each: bool
) -> tuple[dict[str, float], dict[str, list[float]]]:
    references = [prompt.reference for prompt in prompts]
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.row)
    batch: dict[str, list[object]] = {name: [prompt.row.get(name) for prompt in prompts] for name in columns}
    batch["prompt"] = [prompt.text for prompt in prompts]
    values, scores = dict[str, float](), dict[str, list[float]]()
    for name in section.metrics:
        metric = find_text_metric(name)
        found = metric.measure(name, predictions, references, batch)
        values |= {f"{prefix}{figure}": value for figure, value in found.items()}
        of_each = metric.measure_each(name, predictions, references, batch) if each else {}
        scores |= {f"{prefix}{figure}": some for figure, some in of_each.items()}
    return values, scores


def find_generating(model: nn.Module) -> PreTrainedModel:
    """Return transformers' own model. Adapters are inside it, and wrappers around it have no generation settings."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _with_settings(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    before = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = before
