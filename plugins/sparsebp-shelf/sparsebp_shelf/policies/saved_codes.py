"""Store a linear's input in a few bits an entry, for the gradient of its weight in `gact`.

Shape letters: N rows (= B*T), D input width, G groups, C bytes of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, final

from sparsebp_cli.policy import Saved

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

_GRID_BYTES = 4  # bytes of a group's offset or step, which are float32 or wider


@final
@dataclass(frozen=True)
class SavedCodes(Saved):
    """Entries in a few bits each, on a separate grid for each group of neighbours.

    Args:
        code_GC: uint8, (G, group * bits / 8): the codes of a group, packed.
        low_G: The smallest entry of each group, float32, or float64 for a float64 input.
        step_G: The distance between two codes, of the same dtype.
        bits: Bits of a code: 1, 2, 4 or 8.
        group: Entries of a group, a multiple of 8; the last group may hold fewer.
        dtype: Floating-point dtype of the input.
    """

    code_GC: Tensor
    low_G: Tensor
    step_G: Tensor
    bits: int
    group: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x_ND: Tensor, bits: int, group: int, generator: Generator) -> Self:
        """Round an input to codes.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            bits: Bits of a code: 1, 2, 4 or 8.
            group: Entries of a group, a multiple of 8.
            generator: Rounds up or down at random, so that the mean is the entry.

        Returns:
            The codes.
        """
        import torch

        flat = x_ND.reshape(-1).to(torch.promote_types(x_ND.dtype, torch.float32))
        missing = -flat.numel() % group
        if missing:
            # Padded with the last entry, which widens no grid.
            flat = torch.cat([flat, flat[-1:].expand(missing)])
        flat = flat.view(-1, group)
        low_G, high_G = flat.amin(1), flat.amax(1)
        step_G = (high_G - low_G) / (2**bits - 1)
        place = (flat - low_G[:, None]) / torch.where(step_G == 0.0, 1.0, step_G)[:, None]
        shift = torch.rand(place.shape, dtype=place.dtype, generator=generator, device=place.device)
        code = (place + shift).floor_().clamp_(0, 2**bits - 1).to(torch.uint8)
        parts = code.view(len(code), -1, 8 // bits)
        packed = parts[..., 0]
        for number in range(1, 8 // bits):
            packed = packed | parts[..., number] << number * bits
        shape = (x_ND.shape[0], x_ND.shape[1])
        return cls(shape, packed.contiguous(), low_G, step_G, bits, group, x_ND.dtype)

    @staticmethod
    def count_bytes(num_entries: int, bits: int, group: int, itemsize: int) -> int:
        """Return the bytes of the codes of ``num_entries`` entries of ``itemsize`` bytes."""
        return -(-num_entries // group) * (group * bits // 8 + 2 * max(itemsize, _GRID_BYTES))

    def restore(self) -> Tensor:
        import torch

        mask = 2**self.bits - 1
        parts = [self.code_GC >> number * self.bits & mask for number in range(8 // self.bits)]
        code = torch.stack(parts, dim=-1).view(len(self.low_G), self.group)
        flat = torch.addcmul(self.low_G[:, None], code.to(self.step_G.dtype), self.step_G[:, None]).view(-1)
        return flat[: self.shape[0] * self.shape[1]].view(self.shape).to(self.dtype)
