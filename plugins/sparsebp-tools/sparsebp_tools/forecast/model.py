"""Build the model of a recipe on tensors without data, to count what it needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from sparsebp_cli.errors import DataError, UnsupportedError
from sparsebp_cli.recipe.schema import ModelSection, QuantizationSection
from sparsebp_cli.source.architecture import Architecture
from sparsebp_cli.source.attention import ALWAYS
from sparsebp_cli.worker.model import CLASSES, explain_failure, prepare_model
from sparsebp_cli.worker.quantization import make_config, settle


def build_by_config(
    section: ModelSection,
    config: PreTrainedConfig,
    pad_token_id: int,
    *,
    architecture: Architecture,
) -> PreTrainedModel:
    """Build a recipe's model in training mode, with adapters, from a config of ``read_model_config`` of the worker,
    without reading weights. Use it on tensors without data, to estimate what the model needs."""
    # Other implementations need a GPU; on tensors without data they store the same as sdpa.
    attention = section.attention if section.attention in ALWAYS else "sdpa"
    options: dict[str, Any] = {"dtype": getattr(torch, section.dtype), "attn_implementation": attention}
    if config.pad_token_id is None:
        config.pad_token_id = pad_token_id
    try:
        model = CLASSES[architecture].from_config(config, **options)
    except Exception as error:
        raise explain_failure(f"model {section.name or section.config}", error) from None
    if section.quantization is not None:
        quantize_without_data(model, section.quantization)
    return prepare_model(model, section, architecture)


def quantize_without_data(model: PreTrainedModel, section: QuantizationSection) -> None:
    """Replace the linears that loading would quantise by 4-bit linears, on tensors without data. Bytes and scales have
    the sizes that loading gives them. Raise UnsupportedError for int8: torchao's weights are not tensors without data.
    """
    if section.type == "int8":
        text = "cannot forecast the memory of an int8 model; train with training.max_steps=2 instead"
        raise UnsupportedError(f"model.quantization: {text}")
    if find_spec(section.package) is None:
        raise DataError(
            f"model.quantization: {section.type} needs {section.package}: pip install 'sparsebp[quantized]'"
        )
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit

    quantizer: Any = AutoHfQuantizer.from_config(make_config(section, model.dtype), pre_quantized=False)
    plain = dict(model.named_modules())
    # bitsandbytes' modules start with weights on the device "meta", of a class that does not accept tensors without
    # data.
    with _disable_current_modes():
        quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    for name, made in model.named_modules():
        if isinstance(made, Linear4bit):
            module: Any = made
            before, options = cast("Any", plain[name]), module.weight
            packed, module.quant_state = quantize_4bit(
                before.weight.detach(),
                compress_statistics=options.compress_statistics,
                quant_type=options.quant_type,
                quant_storage=options.quant_storage,
            )
            module.weight = nn.Parameter(packed, requires_grad=False)
            vars(module.weight).update(vars(options) | {"quant_state": module.quant_state, "bnb_quantized": True})
            module.bias = before.bias
    quantizer.postprocess_model(model)
    settle(model)
