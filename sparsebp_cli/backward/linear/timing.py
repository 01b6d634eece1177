"""Timing of the forms of selected products, each in turn with masking the gradient and multiplying densely.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear.function import (
    Gradients,
    Needs,
    Order,
    WeightLayout,
    differentiate,
    run_kernel,
    weight_of,
)
from sparsebp_cli.policy import (
    Blocks,
    Columns,
    Elements,
    GradientSelector,
    InformedSelector,
    Rows,
    Selection,
    Site,
    Stateful,
    Step,
    TwoToFour,
)
from sparsebp_cli.run.break_even import FormTime

ROUNDS = 5  # in each, every share is timed once in both ways
# See decision 60.
MOST_SECONDS = 10.0
REPEATS_ON_CUDA = 4  # passes between two waits for the device, which training does not wait for either
BLOCK = (32, 32)  # of policies that cannot be asked

Timer = Callable[[Callable[[], object]], float]  # runs something and returns the seconds that it took


@final
@dataclass(frozen=True)
class Masked(Selection):
    """A selection without a form of its own: it is applied, and the product is dense."""

    selection: Selection

    def apply(self, grad_NO: Tensor) -> Tensor:
        return self.selection.apply(grad_NO)

    def num_kept(self, grad_NO: Tensor) -> int | Tensor:
        return self.selection.num_kept(grad_NO)


@dataclass
class TimedCase:
    """One form at one shape."""

    kind: type[Selection]
    module: nn.Module
    form: WeightLayout
    policy: GradientSelector
    trains: bool = False
    shares: set[float] = field(default_factory=set)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind.__name__, *shape_of(self.module, self.form)


def shape_of(module: nn.Module, form: WeightLayout) -> tuple[int, int]:
    """Return the output and input width of a linear."""
    return form.sizes(weight_of(module))


@dataclass(frozen=True)
class _Fixed:
    """A decision that was made already, as a :class:`~sparsebp_cli.backward.linear.function.SelectionSource`."""

    form: WeightLayout
    selection: Selection
    reference: Literal[False] = False
    reads_input: Literal[False] = False

    def decide(self, grad_NO: Tensor, *_: object) -> tuple[Tensor, Selection]:
        return grad_NO, self.selection


def time_all(cases: Sequence[TimedCase], num_rows: int, timer: Timer | None, most_seconds: float) -> Iterator[FormTime]:
    """Time cases until the time is over, each for an equal part of what is left."""
    spent = 0.0
    for number, case in enumerate(cases):
        if spent >= most_seconds:
            return
        device = weight_of(case.module).device
        rounds = _Rounds(timer or _make_timer(device), (most_seconds - spent) / (len(cases) - number))
        with torch.no_grad():
            dtype = weight_of(case.module).dtype
            if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
                dtype = torch.get_autocast_dtype(device.type)
            with torch.autocast(device.type, enabled=False):
                points = rounds.run(case, num_rows, dtype)
        spent += rounds.seconds
        if points:
            kind, num_outputs, num_inputs = case.key
            yield FormTime(kind, num_outputs, num_inputs, num_rows, str(dtype)[6:], _name_of(device), points)


@dataclass
class _Rounds:
    """Rounds in which a form and its alternative run in turn."""

    timer: Timer
    most_seconds: float
    seconds: float = 0.0

    def run(self, case: TimedCase, num_rows: int, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        """Return each share and the median of its ratios; nothing if there is no form here, or no time for a round."""
        _, num_outputs, num_inputs = case.key
        weight, bias = weight_of(case.module).detach().to(dtype), case.module.bias
        needs = Needs(True, case.trains, isinstance(bias, Tensor) and bias.requires_grad)
        generator = torch.Generator(weight.device).manual_seed(0)

        def draw(width: int) -> Tensor:
            return torch.randn(num_rows, width, generator=generator, device=weight.device, dtype=dtype)

        grad_NO, x_ND = draw(num_outputs), draw(num_inputs) if case.trains else None

        def prepare(selection: Selection) -> Callable[[], Gradients]:
            source = _Fixed(case.form, selection)
            return partial(differentiate, source, grad_NO, x_ND, weight, needs, num_inputs, Order())

        pairs = dict[float, tuple[Callable[[], object], Callable[[], object]]]()
        for share in sorted(case.shares):
            selection = _make_selection(case, share, grad_NO)
            if run_kernel(case.form, grad_NO, x_ND, weight, selection, needs) is None:
                return ()
            pairs[share] = prepare(selection), prepare(Masked(selection))
        ratios: dict[float, list[float]] = {share: [] for share in pairs}
        for number in range(1 + ROUNDS):
            if number and self.seconds >= self.most_seconds:
                break
            for share, (form, masked) in pairs.items():
                if number % 2:
                    other, mine = self._time(masked), self._time(form)
                else:
                    mine, other = self._time(form), self._time(masked)
                if number:  # the first is a warm-up
                    ratios[share].append(mine / max(other, 1e-12))
        return tuple((share, round(statistics.median(found), 4)) for share, found in ratios.items() if found)

    def _time(self, run: Callable[[], object]) -> float:
        seconds = self.timer(run)
        self.seconds += seconds
        return seconds


def _make_selection(case: TimedCase, share: float, grad_NO: Tensor) -> Selection:
    """Return a selection of this kind and share; which entries it keeps does not change the time."""
    num_rows, num_outputs = grad_NO.shape
    if case.kind is Rows:
        return Rows(_spread(num_rows, share, grad_NO))
    if case.kind is Columns:
        return Columns(_spread(num_outputs, share, grad_NO))
    if case.kind is Elements:
        return Elements(_spread(grad_NO.numel(), share, grad_NO))
    if case.kind is TwoToFour:
        return TwoToFour((torch.arange(num_outputs, device=grad_NO.device) % 4 < 2).expand(num_rows, -1).contiguous())
    rows, columns = _block_shape(case.policy, grad_NO)
    num_blocks = -(-num_rows // rows) * -(-num_outputs // columns)
    return Blocks(_spread(num_blocks, share, grad_NO), (rows, columns))


def _spread(count: int, share: float, like: Tensor) -> Tensor:
    num_kept = max(1, round(share * count))
    return torch.arange(num_kept, device=like.device) * count // num_kept


def _block_shape(policy: GradientSelector, grad_NO: Tensor) -> tuple[int, int]:
    """Return the shape of the blocks that a policy keeps, which it alone knows: it is asked once."""
    if not isinstance(policy, InformedSelector | Stateful):
        chosen = policy.select(grad_NO, Site("", grad_NO.shape[1], (grad_NO.shape[0],)), Step(0))
        if isinstance(chosen, Blocks):
            return chosen.block_shape
    return min(BLOCK[0], grad_NO.shape[0]), min(BLOCK[1], grad_NO.shape[1])


def _make_timer(device: torch.device) -> Timer:
    on_cuda = device.type == "cuda"
    repeats = REPEATS_ON_CUDA if on_cuda else 1

    def time_once(run: Callable[[], object]) -> float:
        if on_cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if on_cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / repeats

    return time_once


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
