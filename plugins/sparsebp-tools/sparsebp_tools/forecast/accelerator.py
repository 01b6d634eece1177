"""Accelerators by name: their memory, and the FLOP rates of their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparsebp_cli.errors import UsageError, did_you_mean

# Fraction of the data-sheet rate that training reaches if nothing was measured: an assumption, which every output
# states. Reports of large trainings have 0.3 to 0.5.
ASSUMED_SHARE = 0.4


@dataclass(frozen=True)
class Accelerator:
    """A device.

    Attributes:
        name: Name that a user types.
        memory_bytes: Data-sheet value, in units of 10**9; the driver shows a little more.
        bfloat16_flops: FLOPs a second of dense products on its tensor units, from the data sheet; None: unknown.
        float32_flops: The same for products in float32 without TF32, PyTorch's default.
    """

    name: str
    memory_bytes: int
    bfloat16_flops: float | None = None
    float32_flops: float | None = None

    def flops_of(self, dtype: str) -> float | None:
        """Return the data-sheet rate of a dtype; None if unknown."""
        return self.bfloat16_flops if dtype == "bfloat16" else self.float32_flops


# Data sheets of NVIDIA and AMD, without sparsity.
KNOWN = (
    Accelerator("a10-24gb", 24 * 10**9, 125e12, 31.2e12),
    Accelerator("a100-40gb", 40 * 10**9, 312e12, 19.5e12),
    Accelerator("a100-80gb", 80 * 10**9, 312e12, 19.5e12),
    Accelerator("h100-80gb", 80 * 10**9, 989e12, 67e12),
    Accelerator("h100-pcie-80gb", 80 * 10**9, 756e12, 51e12),
    Accelerator("h200-141gb", 141 * 10**9, 989e12, 67e12),
    Accelerator("l4-24gb", 24 * 10**9, 121e12, 30.3e12),
    Accelerator("l40s-48gb", 48 * 10**9, 362e12, 91.6e12),
    Accelerator("mi300x-192gb", 192 * 10**9, 1307e12, 163e12),
    Accelerator("rtx-3090-24gb", 24 * 10**9, 71e12, 35.6e12),
    Accelerator("rtx-4090-24gb", 24 * 10**9, 165e12, 82.6e12),
)


def find_accelerator(word: str) -> Accelerator:
    """Return the accelerator for a name, or for an amount of memory such as ``48gb``.

    Args:
        word: The user's input.

    Returns:
        The accelerator.

    Raises:
        UsageError: The input is neither.
    """
    name = word.strip().lower()
    for one in KNOWN:
        if one.name == name:
            return one
    size = re.fullmatch(r"([1-9]\d{0,4})\s*gb", name)
    if size is not None:
        return Accelerator(name, int(size[1]) * 10**9)
    names = [one.name for one in KNOWN]
    raise UsageError(f"--gpu: {word!r} is neither a size, such as 48gb, nor one of {', '.join(names)}"
                     f"{did_you_mean(name, names)}")  # fmt: skip
