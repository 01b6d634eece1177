"""Check what an attention implementation needs of a machine, by its name and without torch."""

from __future__ import annotations

import re
from importlib.util import find_spec

from sparsebp_cli.errors import AbsentDataError, DataError
from sparsebp_cli.recipe.schema import HUB_KERNEL

ALWAYS = ("sdpa", "eager")  # all others need CUDA
# The module that an implementation needs, and its name for pip.
PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
OF_KERNELS = ("kernels", "kernels")  # for a hub kernel, such as kernels-community/flash-attn


def refuse_missing_package(name: str) -> None:
    """Raise AbsentDataError for an implementation whose package is not installed on this machine."""
    needed = OF_KERNELS if re.fullmatch(HUB_KERNEL, name) else PACKAGES.get(name)
    if needed is not None and find_spec(needed[0]) is None:
        raise AbsentDataError(f"{name} needs the package {needed[1]}, which is not installed here; {_always()}")


def refuse_device(name: str, device: str) -> None:
    """Raise DataError for an implementation that does not run on a device type such as ``cpu``."""
    if name not in ALWAYS and device != "cuda":
        reason = ", because PyTorch has no backward pass for it on CPUs" if name == "flex_attention" else ""
        raise DataError(f"model.attention: {name} needs a CUDA device{reason}; this run is on {device}; {_always()}")


def _always() -> str:
    return f"{' and '.join(ALWAYS)} always work"
