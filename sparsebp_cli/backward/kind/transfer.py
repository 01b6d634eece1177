"""Copies from the host to the device that computes, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Return tensors of whole numbers or truth values on a device, in one copy that the host does not wait for.

    Tensors are all on the CPU. Pageable memory would make the host wait for all that the device has to do before.
    """
    if device.type == "cpu":
        return tensors
    flat = torch.cat([tensor.flatten().long() for tensor in tensors])
    parts = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    sizes = [tensor.numel() for tensor in tensors]
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts.split(sizes), tensors, strict=True)]
