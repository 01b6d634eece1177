"""Triton kernels for CUDA, and the only code that decides where they run. It does not depend on policies.

``find(tensor)`` returns the operations for the device and dtype of a tensor. It returns None on a CPU, without Triton,
on a device older than compute capability 8.0, for float64, and if small test cases fail to compile or are wrong. This
package imports torch and Triton only when a caller passes a tensor on CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)


_disabled = [False]


@contextmanager
def disabled() -> Iterator[None]:
    """Return a context without Triton's kernels and merged flash attention, so that a benchmark can compare."""
    before, _disabled[0] = _disabled[0], True
    try:
        yield
    finally:
        _disabled[0] = before


def is_disabled() -> bool:
    """Return whether the caller is inside :func:`disabled`."""
    return _disabled[0]


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on CUDA. There, callers prefer one read of memory over less arithmetic."""
    return tensor.is_cuda


def find(tensor: Tensor, *, multiplies: bool = False) -> Any:
    """Return the module of operations for a tensor, or None where the caller must use PyTorch's operations.

    Args:
        tensor: The gradient, a matrix.
        multiplies: Whether the caller multiplies it; a float32 tensor then needs TF32 to be allowed.

    Returns:
        :mod:`sparsebp_cli.policy.kernel.operation`, or None.
    """
    if _disabled[0] or not is_on_gpu(tensor) or not tensor.is_floating_point() or tensor.element_size() not in (2, 4):
        return None
    if _is_compiling() or (multiplies and tensor.element_size() == 4 and not _allows_tf32()):
        return None
    return find_on(tensor.device, tensor.dtype if multiplies else None)


@cache
def find_on(device: torch.device, product: torch.dtype | None = None) -> Any:
    """Return the operations on a CUDA device, or None. ``product`` is the dtype of the factors, None for scores.

    The first call for each dtype compares small cases with PyTorch's operations. Only then the host waits.
    """
    import torch

    if torch.version.cuda is None or find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        operation = import_module("sparsebp_cli.policy.kernel.operation")  # built with the machine's C compiler
        check = import_module("sparsebp_cli.policy.kernel.check")
        wrong = check.find_wrong(operation, device, product)
        reason = f"wrong results: {', '.join(wrong)}"
    except Exception as error:  # no compiler, a folder without write access, a device that Triton does not support
        wrong, reason = ["all"], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if wrong:
        log.warning("Triton's kernels are not used on %s (%s): PyTorch's operations are used", device, reason)
        return None
    return operation


def _is_compiling() -> bool:
    import torch

    return torch.compiler.is_compiling()  # no small case can run then, so PyTorch's operations are compiled


def _allows_tf32() -> bool:
    import torch

    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
