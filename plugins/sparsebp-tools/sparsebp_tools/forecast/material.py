"""Gather what a rehearsed step needs: the config, and the recipe's own data if they are here, else full batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from sparsebp_cli.errors import DataError, UnsupportedError
from sparsebp_cli.policy import Policy, ReferenceReader
from sparsebp_cli.policy.known_kind import find_columns
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.source import DATASETS, MODELS, find_source
from sparsebp_cli.source.architecture import Architecture, find_architecture
from sparsebp_cli.source.name import hub_folder
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import IGNORED, Data, EncodedExample, build_data
from sparsebp_cli.worker.model import build_tokenizer, read_model_config
from sparsebp_cli.worker.price import shape_of
from sparsebp_tools.forecast.record import BatchForecast

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MOST_ROWS = 5_000  # most rows of the data to read
MOST_BATCHES = 1_000  # most batches whose shapes are read
PREDICTED = 7  # one in this many positions of a masked language model has a label
VOCABULARY = 32_000  # for a config without vocabulary size, if there is no tokenizer


@dataclass(frozen=True)
class Material:
    """Config and examples."""

    config: PreTrainedConfig
    architecture: Architecture
    data: Data
    pad_token_id: int
    is_read: bool  # the examples come from the recipe's own data
    note: str  # description of the examples for people

    def describe(self, recipe: Recipe, order: BatchOrder) -> tuple[int, BatchForecast]:
        """Return the number of the largest micro-batch, and its description."""
        training = recipe.training
        most = min(training.max_steps * training.gradient_accumulation_steps, MOST_BATCHES)
        shapes = [shape_of(order[number]) for number in range(most if self.is_read else 1)]
        sizes = [examples * length for examples, length in shapes]
        largest = sizes.index(max(sizes))
        labels = order[largest]["labels"]
        share = float((labels != IGNORED).sum() / labels.numel()) if labels.ndim > 1 else 1.0
        scale = fmean(sizes) / sizes[largest]
        examples, length = shapes[largest]
        return largest, BatchForecast(
            examples=examples,
            length=length,
            trained_share=share,
            scale=scale,
            is_read=self.is_read,
            note=self.note,
        )


def gather_material(recipe: Recipe, policies: Sequence[Policy]) -> Material:
    """Read the config, and the data if they and the tokenizer are on this machine. Raise DataError if the config is
    missing, and UnsupportedError for policies that compare with a reference model."""
    if any(isinstance(policy, ReferenceReader) and policy.reads_reference for policy in policies):
        raise UnsupportedError("--memory cannot forecast a policy that uses a reference model")
    _require_config(recipe)
    tokenizer = _find_tokenizer(recipe)
    size = VOCABULARY if tokenizer is None else len(tokenizer)
    config = read_model_config(recipe.model, size, None)
    architecture = find_architecture(config.to_dict(), recipe.dataset.format)
    data = None if tokenizer is None else _find_data(recipe, tokenizer, policies, architecture)
    pad = 0 if tokenizer is None or not isinstance(tokenizer.pad_token_id, int) else tokenizer.pad_token_id
    note = "the largest micro-batch of the recipe's data"
    if data is None:
        vocabulary = config.get_text_config().vocab_size
        data = _make_data(recipe, architecture, vocabulary)
        note = "assumed: full, with all positions trained, because data or tokenizer is not on this machine"
    labels = len(data.label_names) if recipe.dataset.format == "classification" else None
    if labels is not None:
        config, architecture = read_model_config(recipe.model, size, labels), "classifier"
    return Material(config, architecture, data, pad, "assumed" not in note, note)


def _require_config(recipe: Recipe) -> None:
    name = recipe.model.name
    if name is None:
        return
    source = find_source(name, MODELS)
    cached = hub_folder(name, "models") if isinstance(source, str) else None
    if isinstance(source, str) and (cached is None or not (cached / "config.json").is_file()):
        raise DataError(
            f"model.name: {name} is not on this machine; a folder that has its config.json is enough for --memory"
        )


def _find_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    name = recipe.model.tokenizer or recipe.model.name or ""
    source = find_source(name, MODELS)
    if isinstance(source, str) and hub_folder(name, "models") is None:
        return None
    try:
        return build_tokenizer(recipe.model)
    except DataError:
        return None


def _find_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, policies: Sequence[Policy], architecture: Architecture
) -> Data | None:
    """Return the first rows of the data; None if they are not here. Raise DataError if they cannot be trained on."""
    section = recipe.dataset
    if isinstance(find_source(section.name, DATASETS), str):
        return None
    if section.chat_template is not None:
        tokenizer.chat_template = section.chat_template
    most = min(section.max_examples or MOST_ROWS, MOST_ROWS)
    few = section.model_copy(update={"max_examples": most})
    return build_data(few, tokenizer, find_columns(policies), architecture)


def _make_data(recipe: Recipe, architecture: Architecture, vocabulary: int) -> Data:
    """Return examples of the recipe's maximum length, without a common prefix."""
    section, training = recipe.dataset, recipe.training
    number = 4 * training.per_device_train_batch_size * training.gradient_accumulation_steps
    generator = np.random.default_rng(0)
    made = []
    for row in range(number):
        ids = generator.integers(0, vocabulary, section.max_seq_length, dtype=np.int64)
        labels = ids
        if section.format == "classification":
            labels = np.array(row % 2, dtype=np.int64)
        elif architecture == "masked":
            labels = np.where(np.arange(len(ids)) % PREDICTED, IGNORED, ids)
        made.append(EncodedExample(ids, labels, document=row, is_pair=architecture == "encoder-decoder"))
    names = ["0", "1"] if section.format == "classification" else []
    return Data(made, [], names)
