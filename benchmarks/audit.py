"""Measures the overhead of an audit: the step time of a plain loop with and without it.

    python benchmarks/audit.py          # minutes on two cores; writes benchmarks/results/audit-cpu.json
    python benchmarks/audit.py --tiny   # the same code in seconds; it measures nothing

Two llamas, one of 23 million parameters and one so small that the audit's own Python is most of a step, on the same
batches. Every round restarts each way from the same weights; the order of the ways alternates; the first step of each
is not counted. After the watched steps the loop goes on without the audit: those steps are the third way, "left alone
again", and must cost what the plain ones do. A count that does not depend on the machine is added: the operators of a
step, each of which the audit sees once. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_audit

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, int]] = {
    "llama, 23M": {"hidden": 512, "wide": 1365, "layers": 6, "heads": 8, "vocabulary": 4096, "length": 512, "batch": 2},
    "llama, tiny": {"hidden": 32, "wide": 64, "layers": 2, "heads": 2, "vocabulary": 128, "length": 32, "batch": 2},
}
ALONE, WATCHED, AFTER = "alone", "watched", "left alone again"


@dataclass
class Way:
    """Step times of one way: forward, backward and update of each counted step, in seconds."""

    name: str
    step_seconds: list[float] = field(default_factory=list)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator and run it."""
        self.number += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure, print and write."""
    args = _read_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    names = ["llama, tiny"] if args.tiny else list(SHAPES)
    models = [_measure(name, args) for name in names]
    _print(models, args)
    result = {
        "format": 1,
        "command": f"python benchmarks/audit.py{' --tiny' if args.tiny else ''}",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers")},
        },
        "rounds": args.rounds,
        "steps": args.steps,
        "models": models,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="seconds, on the tiny model alone")
    parser.add_argument("--rounds", type=int, help="how often each way trains; 5, tiny: 1")
    parser.add_argument("--steps", type=int, help="counted steps of each; 4, tiny: 1")
    parser.add_argument("--threads", type=int, help="of PyTorch; its own choice by default")
    parser.add_argument("--out", type=Path, help="file of the results")
    args = parser.parse_args()
    args.rounds, args.steps = args.rounds or (1 if args.tiny else 5), args.steps or (1 if args.tiny else 4)
    name = "audit-cpu-tiny.json" if args.tiny else "audit-cpu.json"
    args.out = args.out or ROOT / "benchmarks" / "results" / name
    return args


class Loop:
    """A plain loop, with a model of one of :data:`SHAPES`, on batches that are the same in every round."""

    def __init__(self, shape: dict[str, int]) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["hidden"],
            intermediate_size=shape["wide"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            max_position_embeddings=shape["length"],
        )
        self.model, self._shape = LlamaForCausalLM(config), shape
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> float:
        """Train one step and return its seconds."""
        ids_BT = torch.randint(0, self._shape["vocabulary"], (self._shape["batch"], self._shape["length"]))
        start = time.perf_counter()
        loss: Tensor = self.model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start


def _measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    ways = {way: Way(way) for way in (ALONE, WATCHED, AFTER)}
    report_seconds: list[float] = []
    for number in range(args.rounds):
        order = (_run_alone, _run_watched) if number % 2 == 0 else (_run_watched, _run_alone)
        for run in order:
            gc.collect()
            run(Loop(SHAPES[name]), ways, report_seconds, args.steps)
        print(f"{name}: round {number + 1} of {args.rounds}", flush=True)
    loop = Loop(SHAPES[name])
    loop.step()  # creates the optimizer's state
    with Operators() as operators:
        loop.step()
    control = ways[ALONE].step_seconds
    return {
        "name": name,
        "shape": SHAPES[name],
        "parameters": sum(parameter.numel() for parameter in loop.model.parameters()),
        "parameter_tensors": len(list(loop.model.parameters())),
        "operators_a_step": operators.number,
        "report_seconds": _spread(report_seconds),
        "ways": [
            {
                "name": way.name,
                "step_seconds": _spread(way.step_seconds),
                "ratio": _spread([one / alone for one, alone in zip(way.step_seconds, control, strict=True)]),
            }
            for way in ways.values()
        ],
    }


def _run_alone(loop: Loop, ways: dict[str, Way], _report_seconds: list[float], steps: int) -> None:
    loop.step()
    ways[ALONE].step_seconds += [loop.step() for _ in range(steps)]


def _run_watched(loop: Loop, ways: dict[str, Way], report_seconds: list[float], steps: int) -> None:
    with sparsebp_audit.audit(loop.model, steps=steps + 1) as audit:
        loop.step()
        ways[WATCHED].step_seconds += [loop.step() for _ in range(steps)]
        ways[AFTER].step_seconds += [loop.step() for _ in range(steps)]  # the audit has ended by itself
    start = time.perf_counter()
    assert audit.report().steps == steps + 1
    report_seconds.append(time.perf_counter() - start)


def _spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "quartiles": [low, high], "number": len(values)}


def _print(models: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"median [quartiles] of {args.rounds} rounds of {args.steps} steps; ratio: to the same step alone")
    for model in models:
        print(
            f"{model['name']}: {model['parameters'] / 1e6:.2f}M parameters in {model['parameter_tensors']} tensors, "
            f"{model['operators_a_step']} operators a step"
        )
        for way in model["ways"]:
            seconds, ratio = way["step_seconds"], way["ratio"]
            low, high = (1000 * value for value in seconds["quartiles"])
            print(
                f"  {way['name']:<18}{1000 * seconds['median']:>9.1f} ms [{low:.1f}, {high:.1f}]"
                f"{ratio['median']:>8.2f}x [{ratio['quartiles'][0]:.2f}, {ratio['quartiles'][1]:.2f}]"
            )
        print(f"  {'report':<18}{1000 * model['report_seconds']['median']:>9.1f} ms, once")


if __name__ == "__main__":
    main()
