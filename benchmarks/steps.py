"""Whole training steps by AdamW of a llama on a GPU: each way to leave work out, beside plain PyTorch.

``gpu.py`` runs them on the device; ``gpu.py --fake`` counts what they would run on one.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.policy import kernel

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
NARROW = ["*k_proj", "*v_proj"]
# Linears of one layer: name, how many, D, O.
LAYERS: dict[str, list[tuple[str, int, int, int]]] = {
    "1B": [("q, o", 2, 2048, 2048), ("k, v", 2, 2048, 512), ("gate, up", 2, 2048, 8192), ("down", 1, 8192, 2048)],
    "8B": [("q, o", 2, 4096, 4096), ("k, v", 2, 4096, 1024), ("gate, up", 2, 4096, 14336), ("down", 1, 14336, 4096)],
}


@dataclass(frozen=True)
class Way:
    """One way to train a step.

    Args:
        label: Name in the table.
        policies: Names and options; None for plain PyTorch.
        attach: Other choices of ``sbp.attach``.
        frozen: Globs over parameters that are not trained.
        rank: Rank of a LoRA of every linear in the layers; 0 for none.
        triton: Whether Triton's kernels may run.
    """

    label: str
    policies: tuple[dict[str, Any], ...] | None = None
    attach: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    rank: int = 0
    triton: bool = True

    @property
    def updates_eagerly(self) -> bool:
        """Whether parameters change during the backward."""
        return self.attach.get("update") == "eager"


def _at(policy: str, keep: float, **options: Any) -> tuple[dict[str, Any], ...]:
    return ({"name": policy, "keep": keep, **options},)


def list_ways() -> list[Way]:
    """Return plain PyTorch first, then every way."""
    found = [
        Way("plain PyTorch"),
        Way("dense, engine", ()),
        Way("frozen lower half", None, frozen=("*embed_tokens*", "lower half")),
        Way("frozen lower half, engine", (), frozen=("*embed_tokens*", "lower half")),
        Way("LoRA 16", None, rank=16),
        Way("LoRA 16, engine", (), rank=16),
        Way("eager update", (), {"update": "eager"}),
        Way("segments 2", (), {"segments": 2}),
        Way("dropbp 0.5", _at("dropbp", 0.5)),
    ]
    for along, more in (("rows", {}), ("columns", {}), ("blocks", {"block": (128, 128)}), ("elements", {})):
        found.append(Way(f"topk {along} 0.25", _at("topk", 0.25, along=along, **more)))
        if along != "elements":
            found.append(Way(f"random {along} 0.25", _at("random", 0.25, along=along, **more)))
    found += [
        Way("topk rows 0.25, wide ones", _at("topk", 0.25), {"exclude": NARROW}),
        Way("topk rows 0.25, no Triton", _at("topk", 0.25), triton=False),
        Way("topk blocks 0.25, no Triton", _at("topk", 0.25, along="blocks", block=(128, 128)), triton=False),
        Way("topk 2:4", _at("topk", 0.5, along="2:4")),
        *(Way(f"tokens {mode} 0.25", _at("tokens", 0.25, score="random", mode=mode)) for mode in MODES),
    ]
    return found


MODES = ("detach", "exact")


class LoRA(nn.Module):
    """A linear that stays as it is, and the product of two small ones that is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype, "bias": False}
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


def prepare(model: nn.Module, way: Way) -> None:
    """Freeze parameters, or put LoRA into the layers: the model is one of its own."""
    layers = model.model.layers  # type: ignore[union-attr]
    if way.rank:
        model.requires_grad_(False)
        for module in list(layers.modules()):  # type: ignore[operator, union-attr]
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(module, LoRA):
                    setattr(module, name, LoRA(child, way.rank))
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in way.frozen):
            parameter.requires_grad_(False)
    if "lower half" in way.frozen:
        layers[: len(layers) // 2].requires_grad_(False)  # type: ignore[arg-type, index, operator, union-attr]


def make_step(
    model: nn.Module, way: Way, batch: dict[str, Tensor], stack: ExitStack, *, updates: bool = True
) -> Callable[[], None]:
    """Return a function that trains one step; what it needs is undone at the end of ``stack``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The learning rate is so small that the weights keep their values: every step of every way computes the same.
    optimizer = torch.optim.AdamW(trained, lr=1e-12, fused=True if updates and trained[0].is_cuda else None)
    engine = None
    if not way.triton:
        stack.enter_context(kernel.disabled())
    if way.policies is not None:
        engine = stack.enter_context(
            sbp.attach(model, list(way.policies), optimizer=optimizer, num_steps=1000, **way.attach)
        )

    def step() -> None:
        loss = model(**batch, use_cache=False).loss
        loss.backward() if engine is None else engine.backward(loss)
        if updates or way.updates_eagerly:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    return step


@dataclass
class Measured:
    """Measured on this device: seconds of steps, and the launches of one."""

    label: str
    host: list[float] = field(default_factory=list)  # until the host has asked for everything
    total: list[float] = field(default_factory=list)  # until the device has done it
    launches: int = 0
    peak_bytes: int = 0
    note: str = ""

    def as_row(self, plain: Measured) -> dict[str, Any]:
        """Return medians, and the speed-up over plain PyTorch in the same rounds."""
        row: dict[str, Any] = {"label": self.label, "note": self.note}
        if self.total:
            pairs = [theirs / mine for mine, theirs in zip(self.total, plain.total, strict=False)]
            row |= {"speedup": round(statistics.median(pairs), 4), "rounds": len(self.total)}
            row |= {"seconds": statistics.median(self.total), "host_seconds": statistics.median(self.host)}
            row |= {"launches": self.launches, "peak_bytes": self.peak_bytes}
        return row


def measure(
    model: LlamaForCausalLM, batch: dict[str, Tensor], ways: list[Way], deadline: float, rounds: int
) -> list[Measured]:
    """Time the steps of every way in turns, each on the same weights, until the deadline.

    Ways that change the model, by LoRA or by freezing, get it changed and back: requires_grad and modules alone differ.
    """
    found = [Measured(way.label) for way in ways]
    shuffle = random.Random(0)
    longest = 0.0
    for number in range(rounds + 1):  # the first is not counted: it compiles
        begin = time.monotonic()
        if number > 1 and begin + longest > deadline:
            break
        order = list(range(len(ways)))
        shuffle.shuffle(order)
        order.sort(key=lambda place: place != 0)  # plain PyTorch first: the others are compared with it
        for place in order:
            if time.monotonic() > deadline:
                found[place].note = found[place].note or "no time was left"
                continue
            try:
                _measure_one(model, batch, ways[place], found[place], is_first=number == 0)
            except Exception as error:  # out of memory, or not supported by this device
                found[place].note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
                model.zero_grad(set_to_none=True)
        longest = max(longest, time.monotonic() - begin) if number else 0.0
    return found


def _measure_one(
    model: LlamaForCausalLM, batch: dict[str, Tensor], way: Way, found: Measured, *, is_first: bool
) -> None:
    device = model.device
    with ExitStack() as stack:
        stack.callback(_restore, model)
        prepare(model, way)
        step = make_step(model, way, batch, stack)
        step()  # makes the optimizer's state
        _wait(device)
        if is_first:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            found.launches = _count_launches(step, device)
            found.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            return
        begin = time.perf_counter()
        step()
        asked = time.perf_counter()
        _wait(device)
        found.host.append(asked - begin)
        found.total.append(time.perf_counter() - begin)


def _restore(model: LlamaForCausalLM) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoRA):
                setattr(module, name, child.base)
    model.requires_grad_(True)
    model.zero_grad(set_to_none=True)


def _count_launches(step: Callable[[], None], device: torch.device) -> int:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as record:
        step()
        _wait(device)
    calls = Counter({event.key: event.count for event in record.key_averages()})
    return sum(calls[name] for name in LAUNCHES)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def print_steps(rows: list[dict[str, Any]]) -> None:
    """Print the measured steps."""
    print(f"\nmeasured: steps, AdamW included{'':<9}{'ms':>9}{'host ms':>9}{'speed-up':>10}{'launches':>10}{'GB':>7}")
    for row in rows:
        if "seconds" not in row:
            print(f"{row['label']:<40} {row['note'] or 'no time was left'}")
            continue
        print(
            f"{row['label']:<40}{1000 * row['seconds']:>9.1f}{1000 * row['host_seconds']:>9.1f}"
            f"{row['speedup']:>9.2f}x{row['launches']:>10}{row['peak_bytes'] / 1e9:>7.1f}"
        )


@dataclass(frozen=True)
class SweepRow:
    """One linear's backward, measured: choosing and multiplying, beside dense and ideal products; in seconds."""

    model: str
    linear: str
    width: int
    num_outputs: int
    keep: float
    dense: float
    ideal: float  # dense products of as many rows as are kept
    choosing: float
    with_triton: float  # choosing included
    without_triton: float


def sweep(device: torch.device, num_rows: int, layers: dict[str, Any], deadline: float) -> list[SweepRow]:
    """Time rows of every linear of a layer, by shape, until the deadline."""
    from sparsebp_cli.backward.linear.function import LinearLayout, Needs, run_kernel
    from sparsebp_cli.policy import choice

    rows = []
    for (model, linears), keep in itertools.product(layers.items(), (0.5, 0.25, 0.1)):
        for name, _, width, num_outputs in linears:
            if time.monotonic() > deadline:
                return rows
            sizes = (num_rows, num_outputs), (num_rows, width), (num_outputs, width)
            grad, x, weight = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)
            kept = max(1, round(keep * num_rows))

            def choose(grad: Tensor = grad, keep: float = keep) -> Any:
                return choice.choose_rows(choice.size(grad, 1), keep)

            def multiply(grad: Tensor = grad, x: Tensor = x, weight: Tensor = weight, choose: Any = choose) -> Any:
                return run_kernel(LinearLayout(), grad, x, weight, choose(), Needs(True, True, False))

            def dense(number: int, grad: Tensor = grad, x: Tensor = x, weight: Tensor = weight) -> Any:
                return grad[:number].mm(weight), grad[:number].t().mm(x[:number])

            with kernel.disabled():
                without = seconds_of(multiply, device)
            found = seconds_of(lambda d=dense: d(num_rows), device), seconds_of(lambda d=dense, k=kept: d(k), device)  # type: ignore[misc]
            triton = seconds_of(multiply, device)
            rows.append(
                SweepRow(model, name, width, num_outputs, keep, *found, seconds_of(choose, device), triton, without)
            )
    return rows


def seconds_of(function: Callable[[], object], device: torch.device, number: int = 5) -> float:
    """Return the median seconds of a call; the first is not counted."""
    times = []
    for _ in range(number + 1):
        _wait(device)
        begin = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def print_sweep(rows: list[SweepRow]) -> None:
    """Print the sweep as shares of dense, and the linears that are better left out."""
    print(f"\nmeasured: rows at linears, over dense{'':<12}{'ideal':>8}{'choosing':>10}{'Triton':>8}{'no Triton':>11}")
    losing: dict[str, set[str]] = {}
    for row in rows:
        best = min(row.with_triton, row.without_triton) / row.dense
        shares = [value / row.dense for value in (row.ideal, row.choosing, row.with_triton, row.without_triton)]
        print(
            f"{row.model:<4}{row.linear:<10}{row.width:>6} to {row.num_outputs:<7}keep {row.keep:<8g}"
            f"{shares[0]:>14.2f}{shares[1]:>10.2f}{shares[2]:>8.2f}{shares[3]:>11.2f}"
        )
        if best > 1.0:
            losing.setdefault(f"{row.model} at {row.keep:g}", set()).add(row.linear)
    for where, names in losing.items():
        print(f"{where}: slower than dense at {', '.join(sorted(names))}: exclude them")
