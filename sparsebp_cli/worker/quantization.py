"""Load quantised bases of a recipe, and dequantise them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from sparsebp_cli.backward.linear.quantized import FourBitLayout, QuantizedLayout, find_quantized
from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import ModelSection, QuantizationSection


def load_options(section: ModelSection, config: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a recipe's model with the given config. Raise DataError if the
    package is missing, or the files are quantised in another way."""
    given, found = section.quantization, _find_in_files(config)
    if given is None:
        if found is not None:
            raise DataError(f"the model's files are quantised: give 'model.quantization: {{type: {found}}}'")
        return {}
    if find_spec(given.package) is None:
        raise DataError(f"model.quantization: {given.type} needs {given.package}: pip install 'sparsebp[quantized]'")
    # Quantise the weights on the CPU, where they are read, so that every device trains the same weights.
    place: dict[str, Any] = {"device_map": {"": "cpu"}}
    if found is None and config.get("quantization_config"):
        text = "the model's files are already quantised by another method: give a model that is not quantised"
        raise DataError(f"model.quantization: {given.type}: {text}")
    if found is not None:
        if found != given.type:
            text = f"the model's files are already quantised: give type: {found}"
            raise DataError(f"model.quantization: {given.type}: {text}")
        return place
    return place | {"quantization_config": make_config(given, getattr(torch, section.dtype))}


def _find_in_files(config: Mapping[str, object]) -> str | None:
    """Return the quantisation type of a model's files; None if it is absent or unsupported."""
    content = config.get("quantization_config")
    if not isinstance(content, Mapping) or content.get("quant_method") != "bitsandbytes":
        return None
    return str(content.get("bnb_4bit_quant_type")) if content.get("load_in_4bit") else None


def make_config(section: QuantizationSection, dtype: torch.dtype) -> BitsAndBytesConfig | TorchAoConfig:
    if section.type == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=section.type, bnb_4bit_compute_dtype=dtype)


def settle(model: PreTrainedModel) -> None:
    """Prepare a model that was just loaded quantised for training. Raise DataError if it has no quantised linear."""
    layouts = [layout for _, layout in find_quantized(model)]
    if not layouts:
        raise DataError("model.quantization: the model has no linear layer that can be quantised")
    for layout in layouts:
        bias = layout.module.bias
        if isinstance(layout, FourBitLayout) and bias is not None:  # else done in the first forward
            bias.data = bias.data.to(layout.module.compute_dtype)
    if hasattr(model, "hf_device_map"):  # otherwise accelerate refuses to move the model
        del model.hf_device_map


def dequantize(model: PreTrainedModel) -> None:
    """Replace the quantised linears of a model by ordinary ones with the dequantised weights."""
    known: Any = model
    dtype = known.config.dtype
    for name, layout in list(find_quantized(model)):
        model.set_submodule(name, _make_plain(layout, dtype))
    known.hf_quantizer.remove_quantization_config(model)


def _make_plain(layout: QuantizedLayout, dtype: torch.dtype) -> nn.Linear:
    weight, bias = layout.module.weight, layout.module.bias
    num_outputs, num_inputs = layout.sizes(weight)
    plain = nn.Linear(num_inputs, num_outputs, bias is not None, device="meta")
    plain.weight = nn.Parameter(layout.restore(weight, dtype))
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(dtype))
    return plain


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Hide a package from the imports in the block."""
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        if before is not None:
            sys.modules[package] = before


def _import_bitsandbytes() -> None:
    """Import bitsandbytes if it is installed, as peft and thus transformers' optimizers do by themselves. Hide the
    package `kernels` meanwhile: on CPUs with bfloat16, version 0.50 would fetch a kernel from a hub and run it."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")  # it reports that the kernel was not fetched
    is_disabled, log.disabled = log.disabled, True
    try:
        with _without("kernels"):
            import bitsandbytes  # noqa: F401
    finally:
        log.disabled = is_disabled


if "bitsandbytes" not in sys.modules and find_spec("bitsandbytes") is not None:
    _import_bitsandbytes()
