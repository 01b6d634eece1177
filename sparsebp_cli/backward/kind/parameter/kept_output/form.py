"""The forms in which an example's output is cached: exact, 16 bits a number, or 8 bits and a scale a position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebp_cli.policy.kept_output import Form

_LARGEST = 127


@dataclass(frozen=True)
class EncodedOutput:
    """One example's encoded output, in host memory."""

    values_TD: Tensor
    scale_T1: Tensor | None  # float32; None: values are not scaled
    dtype: torch.dtype  # dtype of the output

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [self.values_TD] if self.scale_T1 is None else [self.values_TD, self.scale_T1]
        return sum(tensor.nbytes for tensor in tensors)

    def decode(self) -> Tensor:
        """Return the output in its own dtype. In the form ``exact`` it equals the encoded output."""
        if self.scale_T1 is None:
            return self.values_TD.to(self.dtype)
        return (self.values_TD.float() * self.scale_T1).to(self.dtype)


def encode(output_TD: Tensor, form: Form) -> EncodedOutput:
    """Return an encoded copy of an example's output, on the host.

    Args:
        output_TD: The output, of any dtype and device.
        form: The form of the cache.

    Returns:
        The encoded output. In the forms ``exact`` and ``bfloat16``, decoding and encoding it returns the same again.
    """
    host_TD = output_TD.detach().to("cpu", copy=True)
    if form == "exact":
        return EncodedOutput(host_TD, None, host_TD.dtype)
    if form == "bfloat16":
        return EncodedOutput(host_TD.to(torch.bfloat16), None, host_TD.dtype)
    wide_TD = host_TD.float()
    scale_T1 = wide_TD.abs().amax(-1, keepdim=True) / _LARGEST
    scale_T1[scale_T1 == 0] = 1.0  # rows of zeros
    return EncodedOutput((wide_TD / scale_T1).round().to(torch.int8), scale_T1, host_TD.dtype)


@dataclass
class RoundingError:
    """The error of all outputs encoded so far: the 2-norm of the differences over the 2-norm of the outputs."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def add(self, output_TD: Tensor, kept_TD: Tensor) -> None:
        """Add the error of one more output, given its decoded form."""
        given, kept = output_TD.detach().to("cpu", torch.float64), kept_TD.to("cpu", torch.float64)
        self.squared_error += float((given - kept).square().sum())
        self.squared_norm += float(given.square().sum())

    @property
    def relative(self) -> float:
        """The relative error; 0 before the first output."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0
