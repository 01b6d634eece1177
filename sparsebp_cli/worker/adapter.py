"""Add peft adapters, new ones or those of an earlier run, and merge them into the saved model."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sparsebp_cli.backward.linear.quantized import find_quantized
from sparsebp_cli.errors import DataError, did_you_mean
from sparsebp_cli.policy.composition import READERS, find_adapter_options
from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_cli.run import durable
from sparsebp_cli.source import MODELS, find_source
from sparsebp_cli.source.adapter import CONFIG, find_adapter, read_adapter
from sparsebp_cli.source.architecture import Architecture
from sparsebp_cli.worker.quantization import dequantize

CHANGES_BASE = ("olora", "pissa")  # initialisations of adapters that subtract them from the base
# peft's names of the tasks; a masked language model has no name there and needs none.
PEFT_TASKS: dict[Architecture, str | None] = {
    "causal": "CAUSAL_LM",
    "masked": None,
    "encoder-decoder": "SEQ_2_SEQ_LM",
    "classifier": "SEQ_CLS",
}


def find_adapter_key(section: ModelSection) -> str:
    """Return the key of a model's section that requests adapters."""
    return next(key for key in ("lora", "peft", "adapter") if getattr(section, key) is not None)


def add_adapters(model: PreTrainedModel, section: ModelSection, architecture: Architecture) -> PreTrainedModel:
    """Return a model with the adapters of its section; only these are trained. Raise DataError, or the error of peft,
    if they do not fit."""
    from peft import PeftModel, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import PeftType

    adapted: PreTrainedModel
    if section.adapter is not None:
        folder = find_adapter(section.adapter, section.name)
        content = read_adapter(folder)
        kind = str(content["peft_type"]).lower()
        if section.quantization is not None and (
            kind in READERS[section.quantization.type] or content.get("init_lora_weights") in CHANGES_BASE
        ):
            raise DataError(f"{section.adapter}: this kind of adapter needs a base model without model.quantization")
        # A newer peft may have written keys that this one does not know. See decision 112.
        known = {"base_model_name_or_path", "task_type", "peft_type", *find_adapter_options(kind)}
        config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(str(content["peft_type"]))](
            **{key: value for key, value in content.items() if key in known and key != "peft_type"}
        )
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=True, config=config)
        return adapted
    if section.lora is not None:
        kind, options = "LORA", _drop_unset(section.lora.model_dump())
    else:
        assert section.peft is not None
        kind, options = section.peft.type.upper(), section.peft.options
    _refuse_unmatched(model, options, f"model.{find_adapter_key(section)}")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type=PEFT_TASKS[architecture], **options)
    adapted = get_peft_model(model, config)
    source = find_source(section.name, MODELS) if section.name is not None else None
    source = source() if callable(source) else source
    base = None if source is None else str(source)
    saved: Any = adapted.peft_config["default"]
    saved.base_model_name_or_path, saved.revision = base, section.revision  # as in the recipe, not as found
    return adapted


def _refuse_unmatched(model: nn.Module, options: Mapping[str, Any], place: str) -> None:
    """Raise DataError for a name that matches no module. peft refuses a list only if none of its names matches, and a
    misspelt ``modules_to_save`` never."""
    names = [name for name, _ in model.named_modules() if name]
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        given = options.get(key)
        for wanted in given if isinstance(given, list) else ():
            if not any(f".{name}".endswith(f".{wanted}") for name in names):
                near = did_you_mean(str(wanted), {name.rpartition(".")[2] for name in names})
                raise DataError(f"{place}.{key}: {wanted!r} matches no module of the model{near}")


def _drop_unset(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out null, false and empty options, because an older peft may not know them."""
    return {key: value for key, value in options.items() if value is not None and value != {} and value is not False}


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def merge_beside(model: nn.Module, folder: Path, *, keeps: bool) -> nn.Module:
    """Write a model's adapters to a folder as peft does, and return the model with them merged into its weights. The
    given model must not be used afterwards, unless ``keeps``: then the weights are copied, which needs memory for two
    copies.

    A quantised base is dequantised first: peft would round the merged weights to the base's few values.
    """
    from peft import PeftModel

    adapted: Any = copy.deepcopy(model) if keeps else model
    adapted.save_pretrained(folder)
    _sort_names(folder / CONFIG, adapted.peft_config["default"])
    if next(find_quantized(adapted), None) is not None:
        adapted.get_base_model().is_loaded_in_4bit = False  # otherwise peft refuses to unload ia3
        base = adapted.unload()
        dequantize(base)
        adapted = PeftModel.from_pretrained(base, str(folder))
    return merge(adapted)


def _sort_names(file: Path, config: object) -> None:
    """Rewrite an adapter's config with peft's sets sorted. Their order differs between processes, so equal runs would
    have unequal files."""
    content = json.loads(file.read_text(encoding="utf-8"))
    sets = {key for key in content if isinstance(getattr(config, key, None), set)}
    ordered = {key: sorted(value) if key in sets else value for key, value in content.items()}
    durable.write_file(file, json.dumps(ordered, indent=2, sort_keys=True))


def merge(model: nn.Module) -> nn.Module:
    """Return a peft model with its adapters merged into its weights. The given model must not be used afterwards.

    An adapter changes only its own module. If the module shares its weight with another one, as the head does in a
    model with tied embeddings, the module gets its own copy for the merged weight.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: Any = model
    owners = Counter(id(weight) for part in adapted.modules() for weight in part.parameters(recurse=False))
    # Except trainable tokens, which are rows of both weights: peft ties their adapters too.
    layers = [part for part in adapted.modules() if isinstance(part, BaseTunerLayer)]
    for base in [part.get_base_layer() for part in layers if not isinstance(part, TrainableTokensLayer)]:
        if owners[id(weight := base.weight)] > 1:
            owners[id(weight)] -= 1
            base.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            config = adapted.get_base_model().config
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    merged: nn.Module = adapted.merge_and_unload()
    return merged
