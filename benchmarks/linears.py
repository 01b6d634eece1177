"""Times every form of a gradient policy at the linears against dense, on one model, in one process.

    python benchmarks/linears.py                      # prints a table, writes benchmarks/results/linears-cpu.json

All cases take turns in every round, so that a machine that others use slows each of them alike; what is reported is the
ratio to plain PyTorch in the same round: median and quartiles. On a CPU the ratio of processor seconds stands beside
that of wall seconds: with one thread both mean the same, and other people's work disturbs it less. The ceiling is what
the speed-up of forward plus backward would be if time went with FLOPs; the realised share is how much of that saving in
time was realised, in wall seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsebp_cli.backward import Engine, attach, count_flops
from sparsebp_cli.plan.cost import ceiling, realised_share
from sparsebp_cli.policy import make_policy

CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("dense", {}),
    *(("topk", {"keep": keep, "along": along}) for along in ("rows", "columns") for keep in (0.5, 0.25, 0.1)),
    ("topk", {"keep": 0.1, "along": "elements"}),
    ("random", {"keep": 0.1, "along": "rows"}),
]


@dataclass(frozen=True)
class Pass:
    """Seconds of one training step, by phase; ``processor`` is the backward in seconds of processor time."""

    forward: float
    backward: float
    optimizer: float
    processor: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer


class Case:
    """The same model and batch for all; attached to its policy only while it runs."""

    def __init__(self, name: str, options: dict[str, Any], model: LlamaForCausalLM, ids: torch.Tensor) -> None:
        self.name, self.options, self.model, self.ids = name, options, model, ids
        self.label = " ".join([name, *(str(value) for value in reversed(options.values()))])
        self.optimizer = torch.optim.SGD(model.parameters(), 0.0)  # moves nothing: every case sees the same gradients
        self.passes: list[Pass] = []

    def attach(self) -> Engine | None:
        """Attach the policy; nothing for plain PyTorch."""
        return None if self.name == "plain" else attach(self.model, [make_policy(self.name, **self.options)])

    def run(self, synchronize: Callable[[], None]) -> Pass:
        """Run one training step."""
        engine = self.attach()
        times, processor = [time.perf_counter()], []

        def tick() -> None:
            synchronize()
            times.append(time.perf_counter())
            processor.append(time.process_time())

        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        tick()
        loss.backward() if engine is None else engine.backward(loss)
        tick()
        self.optimizer.step()
        self.optimizer.zero_grad()
        tick()
        if engine is not None:
            engine.detach()
        return Pass(*(after - before for before, after in itertools.pairwise(times)), processor[1] - processor[0])

    def count(self) -> tuple[int, int, float, float]:
        """Return executed forward and backward FLOPs, and the sites' dense and claimed backward FLOPs."""
        engine = self.attach()
        with count_flops() as forward:
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        with count_flops() as backward:
            loss.backward() if engine is None else engine.backward(loss)
        self.optimizer.zero_grad()
        dense, claimed = (0.0, 0.0) if engine is None else (engine.claim().dense_flops, engine.claim().claimed_flops)
        if engine is not None:
            engine.detach()
        return forward.total, backward.total, dense, claimed


def quartiles(values: list[float]) -> dict[str, float]:
    """Return median and quartiles, rounded to four digits."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}


def measure(cases: list[Case], rounds: int, warmup: int, synchronize: Callable[[], None]) -> None:
    """Run all cases in turn, in another order each round."""
    shuffle = random.Random(0)
    for number in range(warmup + rounds):
        order = list(cases)
        shuffle.shuffle(order)
        for case in order:
            result = case.run(synchronize)
            if number >= warmup:
                case.passes.append(result)


def summarise(cases: list[Case]) -> list[dict[str, Any]]:
    """Return one record a case: ratios to plain PyTorch in the same round, FLOPs, ceiling, realised share."""
    plain = cases[0]
    _, plain_backward, _, _ = plain.count()
    records = []
    for case in cases:
        forward_flops, executed, dense, claimed = case.count()
        bound = ceiling(forward_flops, plain_backward, plain_backward - dense + claimed)
        pairs = list(zip(case.passes, plain.passes, strict=True))
        ratio = quartiles([(a.forward + a.backward) / (b.forward + b.backward) for a, b in pairs])
        share = realised_share(1.0, ratio["median"], bound)
        records.append(
            {
                "case": case.label,
                "backward_seconds": quartiles([p.backward for p in case.passes]),
                "backward_ratio": quartiles([a.backward / b.backward for a, b in pairs]),
                "backward_processor_ratio": quartiles([a.processor / b.processor for a, b in pairs]),
                "forward_backward_ratio": ratio,
                "step_ratio": quartiles([a.step / b.step for a, b in pairs]),
                "backward_flops_executed": executed,
                "backward_flops_ratio": round(executed / plain_backward, 4),
                "ceiling": round(bound, 3),
                "realised_share": None if share is None else round(share, 3),
                "passes": [asdict(p) for p in case.passes],
            }
        )
    return records


def facts(device: str, args: argparse.Namespace, model: LlamaForCausalLM) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "blas": _blas(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": [round(value, 2) for value in psutil.getloadavg()],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "sparsebp")},
        "parameters": model.num_parameters(),
        "options": {key: value for key, value in vars(args).items() if key != "out"},
    }


def _blas() -> str:
    lines = (line.strip(" -") for line in torch.__config__.show().splitlines())
    return next((line for line in lines if "Math" in line or "BLAS" in line), "unknown")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/linears-DEVICE.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
    )
    model = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).train()
    ids = torch.randint(0, config.vocab_size, (args.batch, args.length), device=args.device)
    cases = [Case(name, options, model, ids) for name, options in CASES]
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    machine = facts(args.device, args, model)
    measure(cases, args.rounds, args.warmup, synchronize)
    records = summarise(cases)
    head = f"{'case':<20}{'backward':>10}{'IQR':>12}{'processor':>11}{'IQR':>12}"
    print(f"{head}{'step':>7}{'FLOPs':>7}{'ceiling':>9}{'realised':>10}")
    for r in records:
        ratios = [r["backward_ratio"], r["backward_processor_ratio"]]
        spreads = [f"{ratio['median']:.3f}{ratio['low']:>7.2f}-{ratio['high']:.2f}" for ratio in ratios]
        realised = "" if r["realised_share"] is None else f"{r['realised_share']:.0%}"
        print(
            f"{r['case']:<20}{spreads[0]:>22}{spreads[1]:>23}{r['step_ratio']['median']:>7.3f}"
            f"{r['backward_flops_ratio']:>7.3f}{r['ceiling']:>9.2f}{realised:>10}"
        )
    out = args.out or Path(__file__).parent / "results" / f"linears-{args.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/linears.py", *(f"--{k} {v}" for k, v in machine["options"].items())])
    out.write_text(json.dumps({"command": command, "facts": machine, "cases": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
