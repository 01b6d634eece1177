"""Measures segments: peak bytes and the time of forward and backward, against plain and checkpointed layers.

    python benchmarks/segments.py                  # a llama of 16 layers on a CPU
    python benchmarks/segments.py --tiny           # shows that the script works, and measures nothing

Bytes are those of ``memory_trace`` over forward and backward: `saved` is the largest sum of what autograd holds,
`peak` the largest sum of everything but the weights. Times are taken in turns on one model; each way's seconds are
divided by plain PyTorch's of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from sparsebp_cli.backward import attach  # noqa: E402
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations, keep_activations  # noqa: E402
from sparsebp_tools.memory import memory_trace  # noqa: E402

TINY = ["--layers", "4", "--hidden", "32", "--vocabulary", "64", "--tokens", "16", "--rounds", "2"]


def build_model(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 32),
        num_key_value_heads=max(1, options.hidden // 32),
        max_position_embeddings=max(options.tokens, 64),
    )
    config.use_cache = False
    with torch.device(options.device):
        return LlamaForCausalLM(config).train()


@contextmanager
def running(model: Any, way: str | int) -> Iterator[Any]:
    """Prepare a way; yields the callable that differentiates a loss."""
    if way == "plain":
        yield torch.Tensor.backward
    elif way == "checkpointed":
        checkpoint_activations(model)
        yield torch.Tensor.backward
        keep_activations(model)
    else:
        with attach(model, [], segments=way) as engine:
            yield engine.backward


def wait(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return bytes and times of every way."""
    model = build_model(options)
    ids = torch.randint(0, options.vocabulary, (options.batch, options.tokens), device=options.device)
    counts = [n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32) if n <= options.layers]
    ways: list[str | int] = ["plain", "checkpointed", *counts]
    seconds: dict[str | int, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {}
    for number in range(options.rounds + 1):
        for way in reversed(ways) if number % 2 else ways:
            with running(model, way) as backward:
                if number == 0:  # the first round traces memory and is not timed
                    with memory_trace(model) as trace:
                        backward(model(input_ids=ids, labels=ids).loss)
                    splits = [point.split for point in trace.curve.points]
                    found[str(way)] = {
                        "saved_bytes": max(split.activations for split in splits),
                        "peak_bytes": max(split.total - split.weights for split in splits),
                    }
                else:
                    start = wait(options.device)
                    backward(model(input_ids=ids, labels=ids).loss)
                    seconds[way].append(wait(options.device) - start)
            model.zero_grad()
    for way in ways:
        ratios = [each / plain for each, plain in zip(seconds[way], seconds["plain"], strict=True)]
        first, _, third = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        found[str(way)] |= {
            "seconds": statistics.median(seconds[way]),
            "time_ratio": statistics.median(ratios),
            "time_ratio_quartiles": [first, third],
        }
    return found


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=11, help="that are timed, after one that is watched")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        options = parser.parse_args([*TINY, *(["--out", str(options.out)] if options.out else [])])
    return options


def main(arguments: list[str]) -> int:
    options = read_options(arguments)
    ways = measure(options)
    print(f"{'way':<14}{'saved MB':>10}{'peak MB':>10}{'time':>8}   quartiles; over plain")
    for way, row in ways.items():
        first, third = row["time_ratio_quartiles"]
        label = f"{way} segments" if way.isdigit() else way
        print(
            f"{label:<14}{row['saved_bytes'] / 1e6:>10.2f}{row['peak_bytes'] / 1e6:>10.2f}{row['time_ratio']:>7.2f}x"
            f"   {first:.2f} to {third:.2f}"
        )
    sizes = {name: value for name, value in vars(options).items() if name not in ("out", "tiny")}
    result = {"options": sizes, "torch": torch.__version__, "threads": torch.get_num_threads(), "ways": ways}
    out = options.out or ROOT / "benchmarks" / "results" / f"segments-{options.device.partition(':')[0]}.json"
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
