"""Copies from the host to the computing device for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Return integer or boolean tensors on a device, by one copy for which the host does not wait.

    All tensors are on the CPU. From pageable memory, the host would wait for all earlier work of the device.
    """
    if device.type == "cpu":
        return tensors
    flat = torch.cat([tensor.flatten().long() for tensor in tensors])
    parts = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    sizes = [tensor.numel() for tensor in tensors]
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts.split(sizes), tensors, strict=True)]
