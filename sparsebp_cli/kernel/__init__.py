"""Triton kernels for CUDA, and the one place that says where they run. It knows tensors and nothing of policies.

``find(tensor)`` returns the operations for the device and type of a tensor, or None: on a CPU, without Triton, on a
device older than compute capability 8.0, for float64, and where a first small kernel cannot be built or is wrong.
Neither torch nor Triton is imported before a tensor on CUDA comes.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)


def find(tensor: Tensor, *, multiplies: bool = False) -> Any:
    """Return the module of operations for a tensor, or None where PyTorch's own are to be used.

    Args:
        tensor: The gradient, a matrix.
        multiplies: Whether it is to be multiplied; float32 is, if TF32 is allowed.

    Returns:
        :mod:`sparsebp_cli.kernel.operation`, or None.
    """
    if not tensor.is_cuda or not tensor.is_floating_point() or tensor.element_size() not in (2, 4):
        return None
    if multiplies and tensor.element_size() == 4 and not _allows_tf32():
        return None
    return find_on(tensor.device)


@cache
def find_on(device: torch.device) -> Any:
    """Return the operations on a CUDA device, or None."""
    import torch

    if torch.version.cuda is None or find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        operation = import_module("sparsebp_cli.kernel.operation")
        norm_N = operation.row_norm(torch.full((1, 16), 0.5, device=device))  # built with the machine's C compiler
        is_right = float(norm_N) == 2.0
        reason = "a norm is wrong"
    except Exception as error:  # no compiler, a folder that cannot be written, a device that Triton does not know
        is_right, reason = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if not is_right:
        log.warning("Triton's kernels do not run on %s (%s): PyTorch's operations are used", device, reason)
        return None
    return operation


def _allows_tf32() -> bool:
    import torch

    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
