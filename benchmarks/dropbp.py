"""Times whole training steps with `dropbp` beside dense ones.

    python benchmarks/dropbp.py          # some minutes on two cores; writes benchmarks/results/dropbp-cpu.json
    python benchmarks/dropbp.py --tiny   # the same code in seconds; it measures nothing

A step is forward, backward and AdamW. Each way has a model of its own with the same weights and the same batches; in
every round each way runs once, in another order, and a ratio is of one round. The backward is timed by itself as well.
FLOPs are those of forward and backward, counted in one step without a clock, over dense; they leave out the optimizer,
which skips the parameters of dropped blocks.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402
from sparsebp_cli.backward import count_flops, saved_bytes  # noqa: E402
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations  # noqa: E402
from sparsebp_tools.bench.row import quartiles  # noqa: E402

# A policy's name and options, and under "attach" further arguments of attach; empty: no policy.
Ways = dict[str, dict[str, Any]]
WAYS: Ways = {"dense": {}, **{f"keep: {keep}": {"name": "dropbp", "keep": keep} for keep in (0.5, 0.25)}}
LEAST_SAVING = 0.02  # of the FLOPs, below which no share of it is told
CHECKPOINTING = "checkpointing"  # the way in which every layer is computed again
FULL = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1365, "num_hidden_layers": 6}
FULL |= {"num_attention_heads": 8}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Way:
    """One model in training, with or without a policy."""

    def __init__(self, model: PreTrainedModel, policy: dict[str, Any], *, checkpointed: bool = False) -> None:
        self.model = copy.deepcopy(model).train()
        if checkpointed:
            checkpoint_activations(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        options = {"num_steps": 1000, **policy.get("attach", {})}
        chosen = {key: value for key, value in policy.items() if key != "attach"}
        self.engine = sbp.attach(self.model, chosen, optimizer=self.optimizer, **options) if policy else None
        self._backward: Callable[[Tensor], None] = (
            torch.Tensor.backward if self.engine is None else self.engine.backward
        )

    def step(self, ids: Tensor) -> tuple[float, float]:
        """Return the seconds of a step, and of its backward."""
        start = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        middle = time.perf_counter()
        self._backward(loss)
        spent = time.perf_counter() - middle
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, spent

    def count(self, ids: Tensor) -> tuple[int, int]:
        """Return the FLOPs of a step's forward and backward, and the bytes kept for the backward."""
        with count_flops() as flops:
            with saved_bytes(self.model.parameters()) as saved:
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            self._backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return flops.total, saved.total


def measure(ways: dict[str, Way], batches: Callable[[], Tensor], rounds: int) -> dict[str, dict[str, Any]]:
    """Return times, ratios and counts of each way."""
    order = random.Random(0)
    for way in ways.values():  # allocates the optimizer's state, and touches every block once or twice
        for _ in range(4):
            way.step(batches())
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        ids, names = batches(), list(ways)
        order.shuffle(names)
        for name in names:
            seconds[name].append(ways[name].step(ids))
    counts = {name: [way.count(batches()) for _ in range(4)] for name, way in ways.items()}
    means = {name: [sum(column) / len(column) for column in zip(*count, strict=True)] for name, count in counts.items()}
    result: dict[str, dict[str, Any]] = {}
    for name, spent in seconds.items():
        pairs = list(zip(seconds["dense"], spent, strict=True))
        result[name] = {
            "step_seconds": quartiles([step for step, _ in spent]),
            "step_speedup": quartiles([dense[0] / ours[0] for dense, ours in pairs]),
            "backward_speedup": quartiles([dense[1] / ours[1] for dense, ours in pairs]),
            "flops_share": (share := means[name][0] / means["dense"][0]),
            "ceiling": 1 / share,
            "realised": realised_share(pairs, share),
            "saved_share": means[name][1] / means["dense"][1],
        }
    return result


def realised_share(pairs: list[tuple[tuple[float, float], tuple[float, float]]], flops_share: float) -> float | None:
    """Return the share of forward's and backward's possible saving that whole steps have, by the median; None if next
    to nothing can be saved."""
    if flops_share > 1 - LEAST_SAVING:
        return None
    return (1 - quartiles([ours[0] / dense[0] for dense, ours in pairs]).median) / (1 - flops_share)


def main(what: str, chosen: Ways, description: str | None) -> None:
    """Measure, print a table, and write the numbers of what is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model that measures nothing")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=ROOT / f"benchmarks/results/{what}-cpu.json")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = TINY if options.tiny else FULL
    length, rounds = (16, 2) if options.tiny else (options.length, options.rounds)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randint(3, sizes["vocab_size"], (options.examples, length), generator=generator)

    before = os.getloadavg()[0]
    ways = {name: Way(model, policy, checkpointed=name == CHECKPOINTING) for name, policy in chosen.items()}
    rows = measure(ways, draw, rounds)
    result = {
        "what": f"whole steps with {what} over dense ones",
        "model": sizes | {"num_parameters": sum(p.numel() for p in model.parameters())},
        "batch": [options.examples, length],
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "load_before": before,  # of the machine, in processes; above 0.2 others were running
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("sparsebp", "torch", "transformers")},
        "ways": rows,
    }
    print(f"{'way':<22} {'step':>20} {'backward':>20} {'FLOPs':>7} {'ceiling':>8} {'realised':>9} {'kept bytes':>10}")
    for name, row in rows.items():
        times = (row[key] for key in ("step_speedup", "backward_speedup"))
        step, backward = (f"{speed.median:.2f}x ({speed.low:.2f}-{speed.high:.2f})" for speed in times)
        realised = "" if row["realised"] is None else f"{row['realised']:.0%}"
        print(
            f"{name:<22} {step:>20} {backward:>20} {row['flops_share']:7.1%} {row['ceiling']:7.2f}x {realised:>9} "
            f"{row['saved_share']:10.1%}"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1, default=dict) + "\n")


if __name__ == "__main__":
    main("dropbp", WAYS, __doc__)
