"""The comparison of a packed pass with the plain one, on one batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebp_cli.backward.kind.packing.batch import Counts, PackedBatch
from sparsebp_cli.backward.kind.packing.head import states_of
from sparsebp_cli.backward.observe.internals import without_hooks

# Relative errors of the whole gradient that rounding explains, by the coarsest dtype in the computation. Wrong masks or
# positions cause errors above 1e-2 in every dtype.
LIMITS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


# Relative errors of a single row that rounding explains, for any errors of other rows.
ROW_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Allowed error of a row, in multiples of the median row's error. Rounding is similar in all rows, and the error of one
# row with a wrong mask would vanish in a norm over all rows.
MOST_TIMES = 10.0


# Entries compared at a time. float64 copies of a whole embedding or of all logits would set the step's peak memory.
CHUNK = 2**18
AGAIN = 1 / 200  # fraction of the batches that are compared although their kind was compared before
MUCH_FARTHER = 10.0  # the pass that is so many times farther from each example alone is wrong


@dataclass(frozen=True)
class Check:
    """The result of one comparison."""

    error: float  # 2-norm of the difference over the 2-norm of the plain result
    limit: float
    row_error: float = 0.0  # the largest relative error of a row that is read
    row_limit: float = 1.0  # allowed row error, from the median of the rows
    compared: Literal["gradient", "outputs"] = "gradient"

    guilty: Literal["plain", "packed", ""] = ""  # the pass that differs from its examples alone; empty: undecided
    from_alone: float = 0.0  # distance of that pass from each example alone, relative to an example's outputs

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference, or the plain step is wrong."""
        return self.guilty == "plain" or self.explained

    def decide(self, plain: float, packed: float) -> Check:
        """Return the check with the pass that is wrong, by the passes' distances from each example alone."""
        if plain > MUCH_FARTHER * packed:
            return replace(self, guilty="plain", from_alone=plain)
        if packed > MUCH_FARTHER * plain:
            return replace(self, guilty="packed", from_alone=packed)
        return self

    @property
    def explained(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.limit and self.row_error <= self.row_limit

    def describe(self) -> str:
        """Return a text about the difference."""
        if self.guilty == "plain":
            return (
                f"lossless is right, but the ordinary step is wrong: its outputs differ by {self.from_alone:.1e} from "
                "those of each example run alone (`sparsebp audit --examples` shows where)"
            )
        if self.guilty == "packed":
            return f"under lossless, outputs differ by {self.from_alone:.1e} from those of each example run alone"
        if self.error > self.limit:
            what = "gradient" if self.compared == "gradient" else "outputs"
            return f"lossless changes the {what} by a relative error of {self.error:.1e} (limit {self.limit:.0e})"
        return (
            f"lossless changes by {self.row_error:.1e} an output that the loss reads, but rounding explains at most "
            f"{self.row_limit:.0e}"
        )


@final
class Comparisons:
    """The batches that are compared with the plain forward, and the kinds of batches for which it was not the same.

    ``verify`` is the policy's option. ``counts`` gets the number of comparisons and the largest error.
    """

    failed: dict[tuple[bool, ...], str]

    def __init__(self, verify: Literal["never", "first", "always"], counts: Counts) -> None:
        self._verify, self._counts = verify, counts
        self.failed = {}  # kinds of batches that run plainly, with the failed comparison
        self._seen: dict[tuple[object, ...], tuple[int, int]] = {}

    def are_due(self, batch: PackedBatch, *more: object, is_probing: bool) -> bool:
        """Return whether to compare a batch: the first and any larger one of its kind, by its signature and ``more``,
        and one of 200, drawn by its number."""
        # A probe does not measure comparisons, since they happen in few steps.
        if self._verify != "first" or is_probing:
            return self._verify == "always"
        key, size = (*batch.signature, *more), batch.layout.shape
        seen = self._seen.get(key, (0, 0))
        self._seen[key] = (max(size[0], seen[0]), max(size[1], seen[1]))
        # A separate generator, since the global one belongs to the training.
        return size[0] > seen[0] or size[1] > seen[1] or random.Random(self._counts.packed).random() < AGAIN

    def find_failure(self, batch: PackedBatch) -> str:
        """Return why a comparison of this kind of batch failed; empty: none failed."""
        # Reading the signature waits for the device, so do it only after a failed comparison.
        return self.failed.get(batch.signature, "") if self.failed else ""

    def count(self, check: Check) -> None:
        """Count a comparison."""
        self._counts.checks += 1
        if check.guilty == "plain":
            self._counts.plain_is_wrong = check.describe()
        else:
            error = check.error if check.compared == "gradient" else check.row_error
            self._counts.error = max(self._counts.error, error)


def compare_passes(
    model: nn.Module,
    leaves: list[Tensor],
    rows: Tensor,
    computed: Tensor,
    plain: Callable[[], Any],
    packed: Callable[[], Any],
) -> Check:
    """Compare two ways to run a batch: outputs, row by row, and the gradients of one scalar.

    The scalar is the loss, or a random sum of the outputs that are read. The result holds for any loss: a loss that
    reads other rows is refused in the backward (:func:`~sparsebp_cli.backward.patch.boundary.fill`), and the backward
    is linear in the gradient of the outputs. ``rows`` (B, T) marks positions that are read, ``computed`` (B, T)
    positions with hidden states, which join the scalar if they are returned. ``leaves`` are the tensors with a
    gradient.
    """
    generator = torch.Generator().manual_seed(0)
    weight: Tensor | None = None
    found: list[Tensor] = []

    def scalar(output: Any) -> Tensor:
        nonlocal weight
        loss: Tensor | None = getattr(output, "loss", None)
        tensor: Tensor | None = output[0] if loss is None else getattr(output, "logits", None)
        # A fused head returns no logits, and some models return one output for each example.
        by_row = tensor is not None and tensor.shape[:2] == rows.shape
        if tensor is not None:
            found.append(tensor.detach()[rows] if by_row else tensor.detach())
        balancing: Tensor | None = getattr(output, "aux_loss", None)  # unscaled, since its coefficient may be tiny
        beside = 0.0 if balancing is None else balancing
        for number, state in enumerate(states_of(output).values()):
            weights = torch.randn(state.shape, generator=torch.Generator().manual_seed(number)).to(state)
            beside = beside + (state * weights).masked_fill(~computed[..., None], 0).sum() / state.numel() ** 0.5
        if loss is not None:
            return loss + beside
        assert tensor is not None
        if weight is None:
            weight = torch.randn(tensor.shape, generator=generator).to(tensor)
        if by_row:
            tensor = tensor.masked_fill(~rows.view(*rows.shape, *[1] * (tensor.dim() - 2)), 0)
        return (tensor * weight).sum() + beside

    return _compare_gradients(model, leaves, lambda: scalar(plain()), lambda: scalar(packed()), found)


def _compare_gradients(
    model: nn.Module,
    leaves: list[Tensor],
    plain: Callable[[], Tensor],
    packed: Callable[[], Tensor],
    outputs: list[Tensor],
) -> Check:
    """Compare two computations of one loss: their gradients for ``leaves``, and the outputs that each has appended.

    This does not change ``.grad``, and calls no hook of the leaves, which may count or change gradients.
    """
    with without_hooks(leaves):
        expected = torch.autograd.grad(plain(), leaves, allow_unused=True)
        got = torch.autograd.grad(packed(), leaves, allow_unused=True)
    squares, norm = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for one, other in zip(expected, got, strict=True):
        if one is None and other is None:
            continue
        exact = torch.zeros_like(other) if one is None and other is not None else one
        found = torch.zeros_like(one) if other is None and one is not None else other
        assert exact is not None
        assert found is not None
        difference, size = _sum_squares(found, exact)
        squares += difference.cpu()
        norm += size.cpu()
    if any(hasattr(leaf.data, "fake_mode") for leaf in leaves):
        return Check(0.0, limit_of(model))  # a forecast runs both passes, but fake tensors have no values to compare
    error = float((squares / norm).sqrt()) if norm else float(squares.sqrt())
    error = float("inf") if isnan(error) else error
    compared = outputs[:2] if len(outputs) == 2 else []

    def judge(dtype: torch.dtype) -> Check:
        worst, allowed = _compare_rows(*compared, floor=ROW_LIMITS[dtype]) if compared else (0.0, 1.0)
        return Check(error, LIMITS[dtype], worst, allowed)

    return _judge_by_dtype(model, judge, plain)


def _judge_by_dtype(model: nn.Module, judge: Callable[[torch.dtype], Check], plain: Callable[[], Any]) -> Check:
    """Return a check with the limits of the model's dtypes. If it fails, use the limits of the coarsest dtype in which
    the plain pass computes, since a model in float64 may compute norms and angles in float32."""
    check = judge(_coarsest(model))
    if check.explained:
        return check
    with torch.no_grad(), _DtypeWatch() as watch:
        plain()
    coarsest = _choose_coarsest({_coarsest(model), *watch.found})
    return check if coarsest == _coarsest(model) else judge(coarsest)


class _DtypeWatch(TorchDispatchMode):
    """Records the dtypes of the results of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self.found.add(one.dtype)
        return result


def _sum_squares(found: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of squares of ``found - exact`` and of ``exact``, in float64."""
    parts = [tensor.to_dense().reshape(-1).split(CHUNK) for tensor in (found, exact)]
    zero = torch.zeros((), dtype=torch.float64, device=exact.device)
    difference, size = zero, zero.clone()
    for one, other in zip(*parts, strict=True):
        wide = other.double()
        size += wide.square().sum()
        # Cast explicitly: PyTorch's mixed operators cast inside, where a forecast does not see the memory.
        difference += one.to(torch.float64, copy=True).sub_(wide).square_().sum()
    return difference, size


def _compare_rows(plain: Tensor, packed: Tensor, *, floor: float, least: float = 0.0) -> tuple[float, float]:
    """Return the largest relative error of a row, and the limit from the median row. Errors of rows smaller than
    ``least`` are relative to ``least``."""
    plain_RX, packed_RX = (torch.atleast_2d(rows.flatten(0, max(0, rows.dim() - 2))) for rows in (plain, packed))
    if plain_RX.shape != packed_RX.shape or not plain_RX.numel():
        return 0.0, 1.0
    size_R, difference_R = _measure_rows(plain_RX, packed_RX)
    # For nearly empty rows a relative error has no meaning.
    error_R = difference_R / size_R.clamp_min(max(float(size_R.mean()) / 100, least))
    worst = float(error_R.max())
    return float("inf") if isnan(worst) else worst, max(floor, MOST_TIMES * float(error_R.median()))


def _measure_rows(plain_RX: Tensor, packed_RX: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms of the plain rows and of the differences from the packed rows, in float64."""
    height = max(1, CHUNK // plain_RX.shape[-1])
    found = []
    for plain, packed in zip(plain_RX.split(height), packed_RX.split(height), strict=True):
        wide = plain.double()
        found.append((wide.norm(dim=-1), packed.to(torch.float64, copy=True).sub_(wide).norm(dim=-1)))
    sizes, differences = zip(*found, strict=True)
    return torch.cat(sizes), torch.cat(differences)


def compare_outputs(model: nn.Module, rows: Tensor, plain: Callable[[], Any], packed: Any) -> Check:
    """Compare the outputs of a forward without gradient: the loss, all outputs that are read, and single rows.

    ``rows`` (B, T) marks the positions that are read.
    """
    expected = plain()
    pairs: list[tuple[Tensor, Tensor, float]] = []
    losses = getattr(expected, "loss", None), getattr(packed, "loss", None)
    by_token = [name for name in ("log_probs", "entropy") if getattr(expected, name, None) is not None]
    for name in by_token:  # outputs of trl's fused head, (B, T - 1): one number for each row
        is_read = rows[:, : getattr(expected, name).shape[1]]
        one, other = (getattr(output, name)[is_read][:, None] for output in (expected, packed))
        pairs.append((one, other, 1.0))
    if not by_token:
        one, other = (output.logits if losses[0] is not None else output[0] for output in (expected, packed))
        by_row = one.shape[:2] == rows.shape
        pairs.append((one[rows] if by_row else one, other[rows] if by_row else other, 0.0))

    def judge(dtype: torch.dtype) -> Check:
        found = [_compare_rows(one, other, floor=ROW_LIMITS[dtype], least=least) for one, other, least in pairs]
        worst, allowed = max(found, key=lambda pair: pair[0] / pair[1])
        return Check(max(errors), LIMITS[dtype], worst, allowed, compared="outputs")

    # Also compare whole outputs: the limit by rows follows the median, so it would accept the same error in all rows.
    errors = [_relative_error(other, one, least) for one, other, least in pairs]
    if losses[0] is not None and losses[1] is not None and bool(losses[0].isfinite()):
        errors.append(_relative_error(losses[1], losses[0], 0.0))
    return _judge_by_dtype(model, judge, plain)


def _relative_error(found: Tensor, exact: Tensor, least: float) -> float:
    """Return the norm of ``found - exact`` over the norm of ``exact``, which counts as at least ``least`` an entry."""
    if found.shape != exact.shape or not exact.numel():
        return 0.0
    difference, size = (float(part) ** 0.5 for part in _sum_squares(found.detach(), exact.detach()))
    error = difference / max(size, least * exact.numel() ** 0.5, 1e-30)
    return float("inf") if isnan(error) else error


def limit_of(model: nn.Module) -> float:
    """Return the relative error of a gradient that rounding explains in a model."""
    return LIMITS[_coarsest(model)]


def _coarsest(model: nn.Module) -> torch.dtype:
    kinds = {parameter.dtype for parameter in model.parameters()}
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        kinds.add(torch.get_autocast_dtype(device))
    return _choose_coarsest(kinds)


def _choose_coarsest(kinds: set[torch.dtype]) -> torch.dtype:
    return max((kind for kind in kinds if kind in LIMITS), key=lambda kind: LIMITS[kind], default=torch.float32)
