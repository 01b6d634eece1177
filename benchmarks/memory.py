"""Measures the overhead of watching a step's memory: plain and watched steps alternate on a llama of a given size.

    python benchmarks/memory.py --hidden 512 --layers 6 --length 512 --batch 4 --picture memory.png

Prints the median of each with its quartiles, the ratio of each watched step to the plain one before it, how long the
record takes to be read afterwards, and the split at the peak; on CUDA also how far the parts lie from the allocator's
own peak. Rounds are interleaved; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from checkout import use_checkout


def build(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return model, optimizer and a batch of random tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=options.length,
    )
    model: Any = LlamaForCausalLM(config).to(options.device)
    ids = torch.randint(0, options.vocabulary, (options.batch, options.length), device=options.device)
    return model, torch.optim.AdamW(model.parameters()), ids


def show_quartiles(values: list[float], factor: float = 1.0) -> str:
    """Format median and quartiles."""
    if len(values) < 2:
        return f"{values[0] * factor:.2f}"
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values) * factor:.2f} [{low * factor:.2f}, {high * factor:.2f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {
        "hidden": 256, "layers": 4, "length": 256, "batch": 2, "vocabulary": 8000, "rounds": 7
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    use_checkout()
    # use_checkout() must run before these imports.
    import torch

    from sparsebp_tools.memory import memory_trace

    model, optimizer, ids = build(options)

    def step() -> float:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    plain, watched, whole = [], [], []
    for _ in range(options.rounds):
        plain.append(step())
        start = time.perf_counter()
        with memory_trace(model, optimizer) as trace:
            watched.append(step())
        whole.append(time.perf_counter() - start)
    ratios = [after / before for before, after in zip(plain, watched, strict=True)]
    print(f"plain step   {show_quartiles(plain, 1e3)} ms")
    print(f"watched step {show_quartiles(watched, 1e3)} ms, {show_quartiles(ratios)} times as long")
    print(f"with reading {show_quartiles(whole, 1e3)} ms, {len(trace.curve.points)} points")
    peak = trace.peak.split
    for part, num_bytes in asdict(peak).items():
        print(f"{part:12} {num_bytes / 1e6:9.2f} MB")
    print(f"{'all':12} {peak.total / 1e6:9.2f} MB, in the {trace.peak.phase}")
    if trace.allocator_peak_bytes is not None:
        difference = trace.allocator_peak_bytes - peak.total
        print(f"{'allocator':12} {trace.allocator_peak_bytes / 1e6:9.2f} MB, {difference:+,} B from the parts")
    if options.picture is not None:
        trace.save(options.picture)


if __name__ == "__main__":
    main()
