"""Eager update: memory of weights, gradients and optimizer state; the price in time; the cost of a hook.

    python benchmarks/eager.py                     # 1.1 billion parameters in bfloat16, on a CPU: 12 GB are needed
    python benchmarks/eager.py --device cuda --layers 32 --hidden 4096 --intermediate 11008    # 6.7 billion
    python benchmarks/eager.py --tiny              # shows that the script works, and measures nothing

A llama with random weights and untied embeddings is trained on random tokens, by AdamW and by APOLLO-Mini, deferred and
eagerly in turns. Bytes are those of ``memory_trace`` over a whole step, the second one, so that the optimizer's
state is there; the figure that counts is the largest sum of weights, gradients and state at any moment of it, over the
weights. Times are those of other steps, deferred and eager in turns on one model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from eager_picture import draw  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from sparsebp_cli.backward import attach  # noqa: E402
from sparsebp_cli.optimizers.apollo import Apollo  # noqa: E402
from sparsebp_tools.memory import MemoryCurve, MemorySplit, memory_trace  # noqa: E402

UPDATES = ("deferred", "eager")
TINY = ["--layers", "4", "--hidden", "64", "--intermediate", "172", "--vocabulary", "128", "--tokens", "16"]
TINY += ["--rounds", "2", "--parameters", "20", "40", "80", "--dtype", "float32"]


def build_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 64),
        tie_word_embeddings=False,
    )
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.train()


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Apollo(model.parameters(), lr=1e-4, rank=1, scale=128.0, scale_type="tensor")


def step(engine: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    engine.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()


def held(curve: MemoryCurve) -> MemorySplit:
    """Return the moment of a step at which weights, gradients and optimizer state are largest together."""
    splits = [point.split for point in curve.points]
    return max(splits, key=lambda split: split.weights + split.gradients + split.optimizer)


def wait(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, MemoryCurve]]:
    """Train with one optimizer, deferred and eagerly in turns."""
    model = build_model(options)
    optimizer = build_optimizer(name, model)
    batch = torch.randint(0, options.vocabulary, (options.batch, options.tokens), device=options.device)
    seconds: dict[str, list[float]] = {update: [] for update in UPDATES}
    curves: dict[str, MemoryCurve] = {}
    splits: dict[str, MemorySplit] = {}
    waited: tuple[str, ...] = ()
    with attach(model, [], optimizer=optimizer, update="eager") as engine:
        step(engine, model, optimizer, batch)  # creates the optimizer's state
    for number in range(options.rounds):
        for update in UPDATES if number % 2 == 0 else reversed(UPDATES):
            with attach(model, [], optimizer=optimizer, update=update) as engine:
                if number == 0:
                    with memory_trace(model, optimizer) as trace:
                        step(engine, model, optimizer, batch)
                    curves[update], splits[update] = trace.curve, held(trace.curve)
                else:
                    start = wait(options.device)
                    step(engine, model, optimizer, batch)
                    seconds[update].append(wait(options.device) - start)
                waited = waited if engine.eager is None else engine.eager.report.waited
    found: dict[str, Any] = {"num_parameters": sum(p.numel() for p in model.parameters()), "waited": list(waited)}
    for update in UPDATES:
        split = splits[update]
        found[update] = {
            "weight_bytes": split.weights,
            "gradient_bytes": split.gradients,
            "optimizer_bytes": split.optimizer,
            "times_the_weights": (split.weights + split.gradients + split.optimizer) / split.weights,
            "step_peak_bytes": curves[update].peak.split.total,
            "step_seconds": statistics.median(seconds[update]),
        }
    found["time_ratio"] = found["eager"]["step_seconds"] / found["deferred"]["step_seconds"]
    return found, curves


class Scanning:
    """LOMO's hook: at every gradient, it visits all parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.hooks = [p.register_post_accumulate_grad_hook(self) for p in parameters]

    def __call__(self, _: torch.Tensor) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None


def time_hooks(num_parameters: int, way: str, rounds: int) -> float:
    """Return the seconds of one backward and update of parameters of one entry each."""
    model = nn.Module()
    model.each = nn.ParameterList(torch.ones(1) for _ in range(num_parameters))
    model.linear = nn.Linear(1, 1)  # a site to attach to
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scanning = Scanning(parameters) if way == "scanning" else None
    engine = attach(model, [], optimizer=optimizer, update="eager") if way == "eager" else None
    seconds = []
    for _ in range(rounds):
        loss = torch.stack([*model.each]).sum() + model.linear(torch.ones(1)).sum()
        start = time.perf_counter()
        loss.backward() if engine is None else engine.backward(loss)
        if scanning is None:
            optimizer.step()
        seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return min(seconds)


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rounds", type=int, default=6, help="the first one is traced, the others are timed; 2 or more"
    )
    parser.add_argument("--parameters", type=int, nargs="*", default=[100, 1000, 10000], help="of the hooks' model")
    parser.add_argument("--optimizers", nargs="*", choices=["adamw", "apollo-mini"], default=["adamw", "apollo-mini"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    return parser.parse_args([*TINY, "--out", str(options.out)]) if options.tiny else options


def main(arguments: list[str]) -> int:
    options = read_options(arguments)
    result: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k != "out"}, "memory": {}}
    result["torch"], result["threads"] = torch.__version__, torch.get_num_threads()
    curves: dict[str, MemoryCurve] = {}
    for name in options.optimizers:
        result["memory"][name], found = measure(name, options)
        curves |= {f"{name}, {update}": curve for update, curve in found.items()}
        for update in UPDATES:
            row = result["memory"][name][update]
            print(
                f"{name:12} {update:9} {row['times_the_weights']:.3f} x weights {row['step_seconds']:.3f} s a step",
                flush=True,
            )
    result["hook_seconds"] = {
        way: {
            str(size): time_hooks(size, way, options.rounds)
            for size in options.parameters
            if way != "scanning" or size <= 1000  # its time grows with the square
        }
        for way in ("deferred", "eager", "scanning")
    }
    for way, row in result["hook_seconds"].items():
        each = ", ".join(f"{size}: {1e6 * seconds / int(size):.1f}" for size, seconds in row.items())
        print(f"microseconds a parameter, {way}: {each}", flush=True)
    place = options.out / f"eager-{options.device.partition(':')[0]}"
    place.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, curves, place.with_suffix(".png"))
    print(f"written: {place}.json, {place}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
