"""Accelerators by name: how much memory they have, and how fast their makers say that they multiply."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparsebp_cli.errors import UsageError, did_you_mean

# Of a maker's rate, what training reaches where nothing was measured: an assumption, which every use of it says.
# Reports of large trainings have 0.3 to 0.5.
ASSUMED_SHARE = 0.4


@dataclass(frozen=True)
class Accelerator:
    """A device.

    Attributes:
        name: What a user types.
        memory_bytes: The maker's figure, in units of 10**9; what the driver shows is a little more.
        bfloat16_flops: FLOPs a second of dense products on its tensor units, by the maker's data sheet; None: unknown.
        float32_flops: The same of products in float32 without TF32, which is PyTorch's default.
    """

    name: str
    memory_bytes: int
    bfloat16_flops: float | None = None
    float32_flops: float | None = None

    def flops_of(self, dtype: str) -> float | None:
        """Return the maker's rate of a dtype; None if it is not known."""
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
    """Return an accelerator by its name, or one of an amount of memory alone, such as ``48gb``.

    Args:
        word: What the user typed.

    Returns:
        The accelerator.

    Raises:
        UsageError: It is neither.
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
