"""The approximation error of a policy's gradient against the dense one, per layer and overall, over random draws.

Sums are float64 over chunks of a tensor. In addition to its input, a comparison holds 32 MiB for the chunks, and from
the second draw on one more set of gradients, in at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor | None]  # by parameter; None means zero

_PIECE = 1 << 20  # entries; four float64 pieces are alive at a time


@dataclass(frozen=True)
class Fidelity:
    """The approximation error of a policy's gradient: cosine, relative error, sign agreement. With several draws
    the first three values are means over the draws.

    Args:
        cosine: Cosine of the angle between both gradients, in [-1, 1]; None if one of them is zero.
        relative_error: Norm of the difference over the norm of the dense gradient; None if that is zero.
        sign_agreement: Fraction of the dense gradient's nonzero entries whose sign the policy's gradient has. Dropped
            entries do not agree. None if all are zero.
        bias: Norm of the mean error over the draws, over the norm of the dense gradient; None unless draws differ.
        bias_standard_error: The ``bias`` expected by chance for an unbiased policy with the same number of draws.
        variance: Mean squared distance of a draw from the mean of draws, over the dense gradient's squared norm.
        squared_error: Squared norm of the difference over the dense gradient's squared norm, mean over the draws.
    """

    cosine: float | None
    relative_error: float | None
    sign_agreement: float | None = None
    bias: float | None = None
    bias_standard_error: float | None = None
    variance: float | None = None
    squared_error: float | None = None


def compare_gradients(policy: Sequence[Tensor | None], dense: Sequence[Tensor | None]) -> Fidelity:
    """Compare a policy's gradients with the dense ones, all parameters together.

    Args:
        policy: One gradient per parameter; None means zero.
        dense: The dense gradients of the same parameters.

    Returns:
        The comparison of this one draw.

    Raises:
        ValueError: The lists have different lengths.
    """
    if len(policy) != len(dense):
        raise ValueError(f"policy and dense must have equally many gradients, got {len(policy)} and {len(dense)}")
    names = [str(number) for number in range(len(dense))]
    comparison = GradientComparison(dict(zip(names, dense, strict=True)))
    comparison.add_draw(dict(zip(names, policy, strict=True)))
    return comparison.overall()


class GradientComparison:
    """Compares a policy's gradients draw by draw, and stores only sums.

    Args:
        dense: The dense gradients, which are not copied.
        part_of: Maps a parameter's name to its part of the model in the report; None: one part.
        num_draws: The number of draws to come, at least 1.
    """

    def __init__(self, dense: Gradients, part_of: Callable[[str], str] | None = None, *, num_draws: int = 1) -> None:
        self._dense, self._num_draws = dense, num_draws
        self._parts = {name: "" if part_of is None else part_of(name) for name in dense}
        self._draws: list[dict[str, _Sums]] = []
        self._error: dict[str, Tensor] = {}  # sum over the draws, by parameter

    def add_draw(self, gradients: Gradients) -> None:
        """Compare one more draw.

        Args:
            gradients: Gradients by the same names as the dense ones; None for a parameter without gradient.
        """
        sums: dict[str, Tensor] = {}
        for name, dense in self._dense.items():
            ours, part = gradients[name], self._parts[name]
            some = dense if ours is None else ours
            if some is None:
                sums.setdefault(part, torch.zeros(6, dtype=torch.float64))
                continue
            new = _measure(ours, dense, some)
            sums[part] = sums[part].to(new.device) + new if part in sums else new
            if self._num_draws > 1:
                self._add_error(name, ours, dense, some)
        self._draws.append({part: _Sums(*values.tolist()) for part, values in sums.items()})

    @property
    def is_random(self) -> bool:
        """Whether two draws differed."""
        return any(draw != self._draws[0] for draw in self._draws[1:])

    def overall(self) -> Fidelity:
        """Return the comparison of all parameters together."""
        return self._fidelity(list(self._draws[0]))

    def by_part(self) -> dict[str, Fidelity]:
        """Return the comparison of each part, in the order of the parameters."""
        return {part: self._fidelity([part]) for part in self._draws[0]}

    def _add_error(self, name: str, ours: Tensor | None, dense: Tensor | None, some: Tensor) -> None:
        dtype = torch.promote_types(some.dtype, torch.float32)
        total = self._error.setdefault(name, torch.zeros(some.shape, dtype=dtype, device=some.device))
        if ours is not None:
            total += ours
        if dense is not None:
            total -= dense

    def _fidelity(self, parts: list[str]) -> Fidelity:
        draws = [sum((draw[part] for part in parts), _Sums()) for draw in self._draws]
        spread = self._spread(parts, draws) if self.is_random else (None, None, None)
        return Fidelity(
            _mean(draw.cosine for draw in draws),
            _mean(draw.relative_error for draw in draws),
            _mean(draw.sign_agreement for draw in draws),
            *spread,
            _mean(draw.error / draw.dense if draw.dense else None for draw in draws),
        )

    def _spread(self, parts: list[str], draws: list[_Sums]) -> tuple[float | None, float | None, float | None]:
        number, dense = len(draws), draws[0].dense
        if not dense:
            return None, None, None
        within = set(parts)
        square = sum(_square(error) for name, error in self._error.items() if self._parts[name] in within)
        variance = max(0.0, (sum(draw.error for draw in draws) - square / number) / (number - 1))
        return math.sqrt(square / dense) / number, math.sqrt(variance / number / dense), variance / dense


@dataclass(frozen=True)
class _Sums:
    """Sums over all entries of a part, in one draw."""

    product: float = 0.0
    policy: float = 0.0  # sum of squares
    dense: float = 0.0
    error: float = 0.0
    same_sign: float = 0.0  # number of entries
    signed: float = 0.0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def cosine(self) -> float | None:
        norms = math.sqrt(self.policy) * math.sqrt(self.dense)
        if not norms:
            return None
        value = self.product / norms
        # Rounding may lead out of [-1, 1]. min and max would turn NaN into a bound.
        return value if math.isnan(value) else min(1.0, max(-1.0, value))

    @property
    def relative_error(self) -> float | None:
        return math.sqrt(self.error / self.dense) if self.dense else None

    @property
    def sign_agreement(self) -> float | None:
        return self.same_sign / self.signed if self.signed else None


def _measure(ours: Tensor | None, dense: Tensor | None, some: Tensor) -> Tensor:
    total = torch.zeros(6, dtype=torch.float64, device=some.device)
    for a, b in zip(_pieces(ours, some), _pieces(dense, some), strict=True):
        error, signed = a - b, b != 0
        same = (a.sign() == b.sign()) & signed
        total += torch.stack([a.dot(b), a.dot(a), b.dot(b), error.dot(error), same.sum(), signed.sum()])
    return total


def _pieces(tensor: Tensor | None, like: Tensor) -> Iterator[Tensor]:
    flat = None if tensor is None else tensor.detach().reshape(-1)
    for start in range(0, like.numel(), _PIECE):
        end = min(start + _PIECE, like.numel())
        if flat is None:
            yield torch.zeros(end - start, dtype=torch.float64, device=like.device)
        else:
            yield flat[start:end].to(torch.float64)


def _square(tensor: Tensor) -> float:
    return float(sum(piece.dot(piece) for piece in _pieces(tensor, tensor)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
