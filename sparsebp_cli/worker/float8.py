"""Lets the linears of a model multiply in float8, by torchao."""

from __future__ import annotations

from typing import Any, Literal

import torch

from sparsebp_cli.errors import DataError

MULTIPLE = 16  # what the float8 units of a GPU ask of both widths of a weight
LOWEST_CAPABILITY = (8, 9)  # of CUDA devices with such units


def convert_to_float8(model: Any, how: Literal["emulated", "native"]) -> None:
    """Put torchao's ``Float8Linear`` in the place of linears; parameters and their names stay as they are.

    The head, and linears with a width that is no multiple of 16, stay in high precision.

    Args:
        model: Of transformers, on any device; changed in place.
        how: ``native`` multiplies in the GPU's float8 units; ``emulated`` casts to the same numbers and multiplies them
            in high precision, on any device.

    Raises:
        DataError: torchao is not installed, there is no such GPU, or nothing can be converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise DataError(f"model.float8: {how} needs torchao: pip install 'sparsebp[float8]'") from None
    if how == "native" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= LOWEST_CAPABILITY):
        raise DataError("model.float8: native needs a GPU of compute capability 8.9 or more; use emulated")
    head = model.get_output_embeddings()

    def fits(module: Any, name: str) -> bool:  # noqa: ARG001 - torchao's signature
        return module is not head and all(size % MULTIPLE == 0 for size in module.weight.shape)

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=how == "emulated"), module_filter_fn=fits)
    if not any(type(module).__name__ == "Float8Linear" for module in model.modules()):
        raise DataError(f"model.float8: {how}: the model has no linear whose widths are multiples of {MULTIPLE}")
