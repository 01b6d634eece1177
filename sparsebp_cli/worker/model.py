"""Build models and tokenizers of a recipe: safetensors only, no remote code, no fallback to another format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from sparsebp_cli.errors import DataError, SparseBPError, did_you_mean, is_out_of_memory
from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_cli.source import MODELS, find_source, read_config
from sparsebp_cli.source.architecture import Architecture, find_architecture
from sparsebp_cli.source.rounded import find_rounded
from sparsebp_cli.source.weight import check_sidecars, check_weights
from sparsebp_cli.worker.adapter import add_adapters, find_adapter_key
from sparsebp_cli.worker.quantization import load_options, settle

CLASSES: dict[Architecture, Any] = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "encoder-decoder": AutoModelForSeq2SeqLM,
    "classifier": AutoModelForSequenceClassification,
}


def build_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe's model, and set a padding token if it has none."""
    source = _folder_or_id(section.tokenizer or section.name or "")
    revision = None if section.tokenizer else section.revision
    if isinstance(source, Path):
        check_sidecars(source)
        if os.path.lexists(source / "config.json"):  # AutoTokenizer reads it to choose the class
            check_weights(source, read_config(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise explain_failure(f"tokenizer {source}", error) from None
    # From a folder with tokenizer_config.json alone, transformers makes an empty tokenizer: texts would have no tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise DataError(
            f"tokenizer {source} has only {len(tokenizer)} special tokens: add tokenizer.json or the vocabulary files "
            "to its folder"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token or tokenizer.unk_token
    return tokenizer


def build_model(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    num_labels: int | None,
    tell: Callable[[str], None] | None = None,
    *,
    architecture: Architecture = "causal",
) -> PreTrainedModel:
    """Build a recipe's model in training mode, with pretrained or random weights and with adapters. ``num_labels`` is
    None for language modelling. ``tell`` receives a line about a classification head that the files lack.
    ``architecture`` comes from :func:`read_architecture`."""
    auto: Any = CLASSES["classifier" if num_labels is not None else architecture]
    options: dict[str, Any] = {"dtype": getattr(torch, section.dtype), "attn_implementation": section.attention}
    config = read_model_config(section, len(tokenizer), num_labels)
    try:
        if section.config is not None:
            model = auto.from_config(config, **options)
        else:
            source = _folder_or_id(section.name or "")
            if isinstance(source, Path):
                check_weights(source, read_config(source))
            options |= load_options(section, config.to_dict())
            options |= _mend_generation(source, section.revision, tell)
            model, found = auto.from_pretrained(
                source,
                config=config,
                revision=section.revision,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _refuse_incomplete reports them by name
                **options,
            )
            if section.quantization is not None:
                settle(model)
                _tell_rounded(section, source, tell)
            new = _refuse_incomplete(source, model, found, is_classification=num_labels is not None)
            if new and tell is not None:
                tell(f"initialised at random because {section.name} has no classification head: {_list(new)}")
    except Exception as error:
        raise explain_failure(f"model {section.name or section.config}", error) from None
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return prepare_model(model, section, "classifier" if num_labels is not None else architecture)


def _mend_generation(
    source: Path | str, revision: str | None, tell: Callable[[str], None] | None
) -> dict[str, GenerationConfig]:
    """Return replacement generation settings if transformers refuses those in the files, else nothing. The number of
    answers per generation, which it refuses, does not concern training."""
    try:
        GenerationConfig.from_pretrained(source, revision=revision or "main")
    except OSError:
        return {}
    except ValueError as error:
        mended = GenerationConfig.from_pretrained(source, revision=revision or "main", num_return_sequences=1)
        if tell is not None:
            tell(f"generation_config.json is not valid, so num_return_sequences is set to 1: {_first_line(error)}")
        return {"generation_config": mended}
    return {}


def _tell_rounded(section: ModelSection, source: Path | str, tell: Callable[[str], None] | None) -> None:
    rounded = find_rounded(source) if isinstance(source, Path) else None
    if rounded is not None and section.quantization is not None and tell is not None:
        tell(
            f"{section.name} contains adapters merged into a base model quantised to {rounded}. Quantising it again "
            "loses most of what they learnt. Instead, leave model.quantization out, or give the base model as "
            "model.name and the run's adapter as model.adapter"
        )


def read_model_config(section: ModelSection, vocab_size: int, num_labels: int | None) -> PreTrainedConfig:
    """Return the config of a recipe's model. ``vocab_size`` is used for a config without it. Raise DataError if the
    config cannot be read."""
    labels = {} if num_labels is None else {"num_labels": num_labels}
    try:
        if section.config is not None:
            config = _random_config(section.config, vocab_size, labels)
        else:
            source = _folder_or_id(section.name or "")
            if isinstance(source, Path):
                read_config(source)  # refuses one that names code
            config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=False, **labels)
    except Exception as error:
        raise explain_failure(f"model {section.name or section.config}", error) from None
    _set_dropouts(config, section.dropout)
    return config


def _set_decoder_start(config: PreTrainedConfig, generation: GenerationConfig | None) -> None:
    """Set the token with which an encoder-decoder's decoder begins. T5's config has none, and files may keep it with
    the generation settings. Otherwise use padding, as in the training of T5 and mT5."""
    if not config.is_encoder_decoder or getattr(config, "decoder_start_token_id", None) is not None:
        return
    start = getattr(generation, "decoder_start_token_id", None)
    config.decoder_start_token_id = config.pad_token_id if start is None else start
    if generation is not None:
        generation.decoder_start_token_id = config.decoder_start_token_id


def prepare_model(model: PreTrainedModel, section: ModelSection, architecture: Architecture) -> PreTrainedModel:
    """Return a model ready for training: without a cache, with the recipe's dropout, float8 linears and adapters."""
    _set_decoder_start(model.config, getattr(model, "generation_config", None))
    model.source_use_cache = model.config.use_cache  # stored in the saved config; read by `save_model`
    model.config.use_cache = False
    if section.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # its probability may not come from the config
                module.p = section.dropout
    if section.float8 is not None:
        convert_to_float8(model, section.float8)
    trained: PreTrainedModel = _adapt(model, section, architecture).train()
    return trained


def read_architecture(section: ModelSection, data_format: str) -> Architecture:
    """Return what a recipe's model is trained as on data of a format. Raise DataError if it cannot be trained on it."""
    if section.config is not None:
        return find_architecture(section.config, data_format)
    source = _folder_or_id(section.name or "")
    try:
        config = _read_config(source, section.revision)
    except Exception as error:
        raise explain_failure(f"model {section.name}", error) from None
    try:
        return find_architecture(config.to_dict(), data_format)
    except DataError as error:
        raise DataError(f"model {section.name}: {error}") from None


def read_head(section: ModelSection, data_format: str) -> list[str]:
    """Return the classes that a classifier's config names, by number; none for random weights and other formats."""
    if section.name is None or data_format != "classification":
        return []
    names = _read_config(_folder_or_id(section.name), section.revision).id2label or {}
    return [str(name) for _, name in sorted(names.items())]


def _read_config(source: str | Path, revision: str | None) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    return config


def predicts_in_place(model: nn.Module) -> bool:
    """Return whether a model's logits predict the label at their own position, as in masked language models and
    encoder-decoders, instead of the next one."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        return False
    return bool(inner.config.is_encoder_decoder) or type(inner).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def _folder_or_id(name: str) -> str | Path:
    source = find_source(name, MODELS)
    return source() if callable(source) else source


def _set_dropouts(config: PreTrainedConfig, probability: float | None) -> None:
    """Set each dropout probability in a config and its sub-configs. None leaves them unchanged."""
    if probability is None:
        return
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _set_dropouts(value, probability)
        elif isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, probability)


def _random_config(values: dict[str, Any], vocab_size: int, labels: dict[str, int]) -> PreTrainedConfig:
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise DataError(f"config.model_type: unknown {model_type!r}{did_you_mean(model_type, CONFIG_MAPPING.keys())}")
    default = AutoConfig.for_model(model_type)
    # T5's config has no such key, but its model reads it.
    known = default.to_dict() | ({"decoder_start_token_id": None} if default.is_encoder_decoder else {})
    for key in values:
        if key not in known:
            raise DataError(f"config.{key}: a {model_type} has no such setting{did_you_mean(key, known)}")
    return AutoConfig.for_model(**({"vocab_size": vocab_size} | values | labels))


def _refuse_incomplete(
    source: object, model: PreTrainedModel, found: LoadingInfo, *, is_classification: bool
) -> list[str]:
    """Return the tensors of a new classification head. Refuse any other tensor that is missing in the files or has
    another shape, because transformers would fill it with random values. transformers itself excludes tied tensors."""
    missing = sorted(found["missing_keys"])
    body = f"{model.base_model_prefix}."
    # BERT's pooler is in the body, and a language model's files have none.
    new = [name for name in missing if is_classification and (not name.startswith(body) or ".pooler." in name)]
    kind = type(model).__name__
    if lacking := [name for name in missing if name not in new]:
        raise DataError(
            f"model {source}: the safetensors files lack {len(lacking)} tensors that a {kind} needs: {_list(lacking)}"
        )
    if other := sorted(str(entry[0]) for entry in found["mismatched_keys"]):
        raise DataError(
            f"model {source}: {len(other)} tensors have other shapes than config.json requires: {_list(other)}"
        )
    return new


class LoadingInfo(TypedDict):
    """What transformers reports about the tensors of a loaded model."""

    missing_keys: Iterable[str]
    mismatched_keys: Iterable[Sequence[object]]


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _adapt(model: PreTrainedModel, section: ModelSection, architecture: Architecture) -> PreTrainedModel:
    if section.adapters is None:
        return model
    try:
        return add_adapters(model, section, architecture)
    except Exception as error:
        raise explain_failure(f"model.{find_adapter_key(section)}", error) from None


def explain_failure(what: str, error: Exception) -> Exception:
    """Turn an error about an unusual model into one line, because libraries raise many types. Return out-of-memory
    errors unchanged, because they are not the model's fault."""
    if isinstance(error, SparseBPError) or is_out_of_memory(error):
        return error
    plain = isinstance(error, OSError | ValueError | TypeError | ImportError | SafetensorError)
    return DataError(f"{what}: {'' if plain else type(error).__name__ + ': '}{_first_line(error)}")


def _first_line(error: Exception) -> str:
    """Return the first line of a message, with the second if the first ends in a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


MULTIPLE = 16  # a GPU's float8 matmuls need both widths of a weight to be multiples of this
LOWEST_CAPABILITY = (8, 9)  # of CUDA devices with float8 units


def convert_to_float8(model: PreTrainedModel, how: Literal["emulated", "native"]) -> None:
    """Replace linears by torchao's ``Float8Linear`` in place; parameters keep their names. The output head keeps its
    precision, and so do linears whose widths are not multiples of 16. ``native`` uses the GPU's float8 units;
    ``emulated`` rounds to the same values and multiplies in high precision on any device."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise DataError(f"model.float8: {how} needs torchao: pip install 'sparsebp[float8]'") from None
    if how == "native" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= LOWEST_CAPABILITY):
        raise DataError("model.float8: native needs a GPU of compute capability 8.9 or more; use emulated")
    head = model.get_output_embeddings()

    def fits(module: nn.Linear, *_: object) -> bool:
        return module is not head and all(size % MULTIPLE == 0 for size in module.weight.shape)

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=how == "emulated"), module_filter_fn=fits)
    if not any(type(module).__name__ == "Float8Linear" for module in model.modules()):
        raise DataError(f"model.float8: {how}: the model has no linear layer whose widths are multiples of {MULTIPLE}")
