"""Conversion of a model's linears to float8 multiplication by torchao."""

from __future__ import annotations

from typing import Any, Literal

import torch

from sparsebp_cli.errors import DataError

MULTIPLE = 16  # float8 matmuls of a GPU need both widths of a weight to be multiples of this
LOWEST_CAPABILITY = (8, 9)  # of CUDA devices with such units


def convert_to_float8(model: Any, how: Literal["emulated", "native"]) -> None:
    """Replace linears by torchao's ``Float8Linear`` in place; parameters keep their names. The output head and linears
    with a width that is no multiple of 16 keep their precision. ``native`` uses the GPU's float8 units; ``emulated``
    rounds to the same values and multiplies in high precision on any device."""
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
