"""Measures the step time of a ``transformers.Trainer`` script before and after the two changed lines.

    python benchmarks/trainer.py          # about ten minutes on two cores; writes benchmarks/results/trainer-cpu.json
    python benchmarks/trainer.py --tiny   # the same code in seconds; it measures nothing

The script is tests/trainer/case/before.py: a Phi with random weights, 512 positions, of which two in each example are
trained. Every round makes each trainer anew, from the same weights, on the same batches; the order of the ways
alternates, and the first step of each is not counted. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from sparsebp_cli.plan import reached_share
from sparsebp_cli.run import metric
from sparsebp_cli.trainer import PolicyTrainer
from tests.trainer import case

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "full": {"vocabulary": 51_200, "hidden": 512, "layers": 6},
    "tiny": {"vocabulary": 256, "hidden": 32, "layers": 2},
}
OPTIONS = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}


@dataclass
class Way:
    """One way to run the script.

    Args:
        name: Name in the table.
        load: Returns the script as a module.
        count: The same, through an engine that counts FLOPs.
        pass_seconds: Forward, backward and clipping of each step.
        step_seconds: The same and the optimizer.
        forward_flops: FLOPs of a micro-batch's forward, mean over the steps.
        backward_flops: FLOPs of a micro-batch's backward, mean over the steps.
    """

    name: str
    load: Callable[[], Any]
    count: Callable[[], Any]
    pass_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    forward_flops: float = 0.0
    backward_flops: float = 0.0


class Clock(TrainerCallback):
    """Records when a step began, when its gradients were complete, and when it ended."""

    def __init__(self) -> None:
        self.pass_seconds: list[float] = []
        self.step_seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self._begin = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Record that the gradients are complete."""
        self.pass_seconds.append(time.perf_counter() - self._begin)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End."""
        self.step_seconds.append(time.perf_counter() - self._begin)


def main() -> None:
    """Count, measure, print and write."""
    args = _read_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    ways = [
        Way("before, all tokens", lambda: _whole(case.before()), lambda: _whole(_dense())),
        Way("before: loss mask", case.before, _dense),
        Way("the same, dense engine", _dense, _dense),
        Way("after: exact", lambda: case.after("exact"), lambda: case.after("exact")),
        Way("after: detach", lambda: case.after("detach"), lambda: case.after("detach")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for way in ways:
            _count(way, Path(folder), args)
        for number in range(args.rounds):
            for place in range(len(ways)):
                _measure(ways[(place + number) % len(ways)], Path(folder), args)
            print(f"round {number + 1} of {args.rounds}", flush=True)
    rows = [_row(way, ways[1]) for way in ways]
    _print(rows, args)
    result = {
        "format": 1,
        "command": f"python benchmarks/trainer.py{' --tiny' if args.tiny else ''}",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        },
        "model": args.size | {"positions": case.before().LENGTH, "examples": 2},
        "rounds": args.rounds,
        "steps": args.steps,
        "ways": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="seconds, on a model that is too small to measure")
    parser.add_argument("--rounds", type=int, help="how often each way trains; 5, tiny: 1")
    parser.add_argument("--steps", type=int, help="counted steps of each; 4, tiny: 1")
    parser.add_argument("--threads", type=int, help="of PyTorch; its own choice by default")
    parser.add_argument("--out", type=Path, help="file of the results")
    args = parser.parse_args()
    args.rounds, args.steps = args.rounds or (1 if args.tiny else 5), args.steps or (1 if args.tiny else 4)
    args.size = SIZES["tiny" if args.tiny else "full"]
    name = "trainer-cpu-tiny.json" if args.tiny else "trainer-cpu.json"
    args.out = args.out or ROOT / "benchmarks" / "results" / name
    return args


def _dense() -> Any:
    """Return the changed script without tokens."""
    lines = case.changed(case.BEFORE, case.TWO_LINES).splitlines()
    changed = ['    return MaskedTrainer(policies=["dense"],' if "policies=[" in line else line for line in lines]
    return case.load("\n".join(changed))


def _whole(script: Any) -> Any:
    """Make a script train every token that is no padding."""
    masked = script.collate

    def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = masked(texts)
        return batch | {"loss_mask": batch["attention_mask"]}

    script.collate = collate
    return script


def _make(script: Any, folder: Path, args: argparse.Namespace) -> Any:
    trainer = script.make_trainer(folder, steps=args.steps + 1, **args.size, **OPTIONS)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _count(way: Way, folder: Path, args: argparse.Namespace) -> None:
    trainer = _make(way.count(), folder, args)
    trainer.policy_callback.log_flops_every = 1
    trainer.train()
    logs = [log for log in trainer.state.log_history if metric.FORWARD_FLOPS.name in log][1:]
    way.forward_flops = sum(log[metric.FORWARD_FLOPS.name] for log in logs) / len(logs)
    way.backward_flops = sum(log[metric.BACKWARD_EXECUTED.name] for log in logs) / len(logs)


def _measure(way: Way, folder: Path, args: argparse.Namespace) -> None:
    trainer, clock = _make(way.load(), folder, args), Clock()
    if isinstance(trainer, PolicyTrainer):
        trainer.policy_callback.log_flops_every = None
    trainer.add_callback(clock)
    gc.collect()
    trainer.train()
    way.pass_seconds += clock.pass_seconds[1:]
    way.step_seconds += clock.step_seconds[1:]


def _row(way: Way, control: Way) -> dict[str, Any]:
    """Return the results of one way against the unchanged script; steps on the same batch are compared."""
    highest = (control.forward_flops + control.backward_flops) / (way.forward_flops + way.backward_flops)
    share = reached_share(median(control.pass_seconds), median(way.pass_seconds), highest)
    ratios = {
        name: [before / after for before, after in zip(getattr(control, name), getattr(way, name), strict=True)]
        for name in ("pass_seconds", "step_seconds")
    }
    return {
        "name": way.name,
        "forward_flops": way.forward_flops,
        "backward_flops": way.backward_flops,
        "pass_seconds": _spread(way.pass_seconds),
        "step_seconds": _spread(way.step_seconds),
        "pass_speedup": _spread(ratios["pass_seconds"]),
        "step_speedup": _spread(ratios["step_seconds"]),
        "pass_ceiling": highest,
        "pass_realised_share": share,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "quartiles": [low, high], "number": len(values)}


def _print(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"median of {args.rounds} rounds of {args.steps} steps; speed-up, ceiling and share over the loss mask")
    print("pass: forward, backward and clipping; step: with the optimizer")
    titles = {"GFLOP fwd": 10, "bwd": 8, "pass ms": 9, "x": 6, "ceiling": 9, "realised": 10, "step ms": 9, "x ": 6}
    print(f"{'way':<24}" + "".join(f"{title.strip():>{width}}" for title, width in titles.items()))
    for row in rows:
        share = row["pass_realised_share"]
        print(
            f"{row['name']:<24}{row['forward_flops'] / 1e9:>10.2f}{row['backward_flops'] / 1e9:>8.2f}"
            f"{1000 * row['pass_seconds']['median']:>9.0f}{row['pass_speedup']['median']:>6.2f}"
            f"{row['pass_ceiling']:>9.2f}{'' if share is None else f'{share:.0%}':>10}"
            f"{1000 * row['step_seconds']['median']:>9.0f}{row['step_speedup']['median']:>6.2f}"
        )


if __name__ == "__main__":
    main()
