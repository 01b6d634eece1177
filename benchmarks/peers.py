"""Compares `lossless` with what a user would pick in its place, on five kinds of updates of a llama of 23M parameters.

    python benchmarks/peers.py                  # ten minutes of one core; writes benchmarks/results/peers.json
    python benchmarks/peers.py --case pairs     # one kind; the others keep their rows
    python benchmarks/peers.py --tiny           # the same code in seconds; it measures nothing

One process, one thread. A pass is forward and backward of all batches of a unit. FLOPs and bytes are counted in one
pass, as operators and allocations happen, beside the error of the gradient against one example at a time in double
precision. Then, in rounds, every way runs once, in another order in each; its seconds are those of the processor that
this process took. The passes before the rounds are not timed: `lossless` compares its gradient with the plain one
there. Bytes are the most that are alive over weights and gradients. Batches are collated, and texts packed, before.

The result is written after every count and every round, and goes on from there: only what is missing is run. Liger's
loss is a row if `liger-kernel` is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from peer_ways import WAYS, Example, Unit, find_gradient, run_alone  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402
from sparsebp_tools.bench.row import quartiles  # noqa: E402

FULL = {"vocab_size": 32_768, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
FULL |= {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 4096}
TINY = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
PACKAGES = ("torch", "transformers", "trl", "liger-kernel")


class Draw:
    """Draws texts of random tokens; lengths are divided by ``scale``."""

    def __init__(self, vocabulary: int, scale: int) -> None:
        self._vocabulary, self._scale = vocabulary, scale
        self._generator = torch.Generator().manual_seed(0)

    def text(self, length: int) -> Tensor:
        """Return a text."""
        length = max(2, length // self._scale)
        return torch.randint(3, self._vocabulary, (length,), generator=self._generator)

    def lengths(self, number: int, median: int, spread: float, least: int, most: int) -> list[int]:
        """Return lengths whose logarithms are normal."""
        normal = torch.randn(number, generator=self._generator)
        return (normal * spread).exp().mul(median).clamp(least, most).long().tolist()

    def alone(self, lengths: list[int], share: float) -> tuple[Example, ...]:
        """Return texts of which a share is prompt."""
        texts = map(self.text, lengths)
        return tuple(Example(text, max(1, int(share * len(text)))) for text in texts)

    def answers(self, prompt: Tensor, lengths: list[int]) -> list[Example]:
        """Return answers to a prompt."""
        return [Example(torch.cat([prompt, self.text(length)]), len(prompt)) for length in lengths]


def make_units(vocabulary: int, scale: int) -> dict[str, Unit]:
    """Return the kinds of updates by name."""
    draw = Draw(vocabulary, scale)
    instructions = draw.alone(draw.lengths(4, 80, 0.7, 12, 240), 1 / 3)
    chats = draw.alone(draw.lengths(4, 110, 0.5, 40, 240), 1 / 2)
    groups = [
        answer
        for length in draw.lengths(2, 88, 0.2, 64, 128)
        for answer in draw.answers(draw.text(length), draw.lengths(4, 22, 0.4, 8, 48))
    ]
    pairs = [
        answer
        for length in draw.lengths(3, 60, 0.5, 24, 160)
        for answer in draw.answers(draw.text(length), draw.lengths(2, 40, 0.6, 8, 100))
    ]
    system, turns = draw.text(64), list[Example]()
    for _ in range(2):
        task = torch.cat([system, draw.text(16)])
        for _ in range(2):
            turn = draw.text(24)
            leaves = [torch.cat([task, turn, draw.text(leaf)]) for leaf in draw.lengths(2, 16, 0.4, 8, 32)]
            turns += [Example(leaf, len(task)) for leaf in leaves]
    return {
        "instructions": Unit(instructions, 2, shares_prompts=False),
        "groups": Unit(tuple(groups), 4, shares_prompts=True),
        "pairs": Unit(tuple(pairs), 2, shares_prompts=True),
        "agent": Unit(tuple(turns), 4, shares_prompts=True),
        "chat": Unit(chats, 2, shares_prompts=False),
    }


def count(model: Any, run: Callable[[], None], truth: list[Tensor]) -> dict[str, float]:
    """Return FLOPs, bytes and error of one pass."""
    model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter, sbp.memory_trace(model) as trace:
        run()
    missed = sum(
        float((own.double() - true).square().sum()) for own, true in zip(find_gradient(model), truth, strict=True)
    )
    norm = sum(float(true.square().sum()) for true in truth)
    split = trace.peak.split
    held = split.activations + split.workspace
    return {"flops": counter.get_total_flops(), "bytes": held, "error": (missed / norm) ** 0.5}


def measure(model: Any, unit: Unit, found: dict[str, Any], rounds: int, save: Callable[[], None]) -> None:
    """Add to the rows of all ways what they lack, and save it whenever there is more."""
    with ExitStack() as stack:
        passes: dict[str, tuple[Any, Callable[[], None]]] = {}
        truth: list[Tensor] = []
        for name, way in WAYS.items():
            if refusal := way.refusal(unit):
                found[name] = {"refused": refusal}
                continue
            own, run = passes[name] = way.prepare(model, unit, stack)
            if way.policy is not None:
                run()  # compares its gradient with the plain one
            if "flops" not in found.get(name, {}):
                truth = truth or run_alone(model, unit.examples, unit.num_labels)
                found[name] = {"lines": way.lines, "option": way.option, **count(own, run, truth), "seconds": []}
                save()
            own.zero_grad(set_to_none=True)
        for number in range(min(len(found[name]["seconds"]) for name in passes), rounds):
            # Another order in each round, and the same one in a process that goes on.
            for name in random.Random(number).sample(list(passes), len(passes)):
                own, run = passes[name]
                start = time.process_time()
                run()
                found[name]["seconds"][number:] = [(time.process_time() - start) / len(unit.examples)]
                own.zero_grad(set_to_none=True)
            _summarize(found, list(passes))
            save()


def _summarize(found: dict[str, Any], names: list[str]) -> None:
    """Add medians and quartiles of the seconds of an example, and of their ratio to the padded way's in the round."""
    padded = found["padded"]["seconds"]
    for name in names:
        row = found[name]
        ratios = [own / plain for own, plain in zip(row["seconds"], padded, strict=True)]
        row |= {"seconds_of_example": quartiles(row["seconds"]).model_dump(), "ratio": quartiles(ratios).model_dump()}


def about(sizes: dict[str, int], parameters: int) -> dict[str, Any]:
    """Return what was measured on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return {
        "versions": versions,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": sizes,
        "parameters": parameters,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short texts: a test of this script")
    parser.add_argument("--case", action="append", metavar="NAME", help="one kind of update; repeat it for several")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of each way")
    parser.add_argument("--out", type=Path, help="file of the result; default: benchmarks/results/peers.json")
    args = parser.parse_args()
    out = args.out or (None if args.tiny else ROOT / "benchmarks" / "results" / "peers.json")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = TINY if args.tiny else FULL
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)).train()
    units = make_units(sizes["vocab_size"], 6 if args.tiny else 1)
    record = {"about": about(sizes, model.num_parameters()), "cases": {}}
    if out is not None and out.exists():
        record["cases"] = json.loads(out.read_text(encoding="utf-8"))["cases"]

    def save() -> None:
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    for name in args.case or units:
        unit, lengths = units[name], [len(example.token_T) for example in units[name].examples]
        sizes_of_case = {"examples": len(lengths), "batch_size": unit.batch_size, "tokens": sum(lengths)}
        case = record["cases"].setdefault(name, sizes_of_case | {"labels": unit.num_labels, "load": [], "ways": {}})
        case["load"].append(round(os.getloadavg()[0], 1))
        measure(model, unit, case["ways"], args.rounds, save)
        print(f"{name}: {len(lengths)} examples, {unit.num_labels} labels, load {case['load']}")
        for way, row in case["ways"].items():
            print(f"  {way}: {row.get('refused') or describe(row)}")


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    counts = f"{row['flops'] / 1e9:.1f} GFLOP, {row['bytes'] / 1e6:.0f} MB, gradient {row['error']:.0e}"
    if "ratio" not in row:
        return counts
    return f"{counts}, {row['seconds_of_example']['median']:.3f} s an example, {row['ratio']['median']:.2f} of padded"


if __name__ == "__main__":
    main()
