"""Decide what a transformers model is trained as, from its config and the data format, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sparsebp_cli.errors import DataError

Architecture = Literal["causal", "masked", "encoder-decoder", "classifier"]

# Tables in transformers.models.auto.modeling_auto, by the task of their models.
TABLES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "classifier": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
OTHERS = {
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech by CTC": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "images and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "time series": "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
}
FORMATS: dict[Architecture, tuple[str, ...]] = {
    "causal": ("text", "completion", "chat"),
    "masked": ("text",),
    "encoder-decoder": ("completion",),
    "classifier": ("classification",),
}
WORDS: dict[Architecture, str] = {
    "causal": "a causal language model",
    "masked": "a masked language model, which fills gaps",
    "encoder-decoder": "an encoder and a decoder, which reads a prompt and writes a completion",
    "classifier": "a classifier",
}


def find_architecture(config: Mapping[str, object], data_format: str) -> Architecture:
    """Return how a model with this config is trained. Raise DataError if its type cannot be trained on data of the
    format. For a type that transformers does not know, return the usual architecture for the format."""
    model_type = config.get("model_type")
    tables = _read_tables()
    if not isinstance(model_type, str) or not any(model_type in types for types in tables.values()):
        return "classifier" if data_format in FORMATS["classifier"] else "causal"
    if data_format in FORMATS["classifier"]:
        if model_type in tables["classifier"]:
            return "classifier"
        raise DataError(f"no model of the type {model_type} can classify texts{_say_others(model_type)}")
    found = _find_language_model(config, model_type)
    if found is None:
        raise DataError(
            f"format {data_format} needs a language model, but a {model_type} is not one{_say_others(model_type)}"
        )
    if data_format not in FORMATS[found]:
        allowed = [*FORMATS[found], *(FORMATS["classifier"] if model_type in tables["classifier"] else [])]
        raise DataError(
            f"a {model_type} is {WORDS[found]}: it cannot be trained with format {data_format}; allowed: "
            f"{', '.join(allowed)}"
        )
    return found


def _find_language_model(config: Mapping[str, object], model_type: str) -> Architecture | None:
    tables = _read_tables()
    # A saved config states it; a config written by hand may rely on the default of its class.
    default = model_type in tables["encoder-decoder"] and model_type not in tables["causal"]
    if config.get("is_encoder_decoder", default):
        return "encoder-decoder" if model_type in tables["encoder-decoder"] else None
    # BERT-like models can also be loaded as decoders; then their config says so. BART's decoder alone is a decoder.
    if model_type in tables["masked"] and not config.get("is_decoder") and model_type not in tables["encoder-decoder"]:
        return "masked"
    return "causal" if model_type in tables["causal"] else None


def _say_others(model_type: str) -> str:
    tables = _read_tables()
    known = [(kind, tables[kind][model_type]) for kind in OTHERS if model_type in tables[kind]]
    if known:
        return f": it is made for {known[0][0]} ({known[0][1]})"
    names = [tables[kind][model_type] for kind in TABLES if model_type in tables[kind]]
    return f" (transformers has {names[0]})" if names else ""


@cache
def _read_tables() -> dict[str, dict[str, str]]:
    """Map each kind to its classes by model type. Read transformers' source, because importing it takes seconds."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in (*TABLES, *OTHERS)}
    kinds = {name: kind for kind, name in (TABLES | OTHERS).items()}
    spec = find_spec("transformers")
    file = Path(spec.origin or "").parent / "models" / "auto" / "modeling_auto.py" if spec is not None else None
    if file is None or not file.is_file():
        return found
    for statement in ast.parse(file.read_bytes()).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        kind = kinds.get(statement.targets[0].id)
        if kind is not None:
            pairs = [node for node in ast.walk(statement.value) if isinstance(node, ast.Tuple) and len(node.elts) == 2]
            found[kind] = dict(filter(None, map(_read_pair, pairs)))
    return found


def _read_pair(node: ast.Tuple) -> tuple[str, str] | None:
    try:
        model_type, name = ast.literal_eval(node)
    except ValueError:
        return None
    return model_type, name if isinstance(name, str) else name[0]
