"""Compares `lossless` with what a user would pick in its place, on seven kinds of updates of two shapes of a llama:
four layers with a vocabulary of 32,768, and 24 layers with one of 4,096.

    python benchmarks/peers.py                           # an hour of one core; writes benchmarks/results/peers.json
    python benchmarks/peers.py --case wide-pairs         # one kind; the others keep their rows
    python benchmarks/peers.py --tiny --case wide-tree   # the same code in two minutes; it measures nothing

A pass is forward and backward of all batches of a unit, with one thread. FLOPs are counted in one pass, as operators
happen, beside the error of the gradient against one example at a time in double precision. Bytes are those of a process
that runs one way alone: its most resident memory in a pass (``VmHWM``), over what it has before, with weights and
gradients. Each tensor there has a mapping of its own, so that what is freed is given back. Then, in rounds, every way
runs once in one process, in another order in each round; its seconds are those of the processor that this process took.
The passes before are not timed: `lossless` compares its gradient with the plain one there. Batches are collated, and
texts packed, before.

The result is written after every count and every round, and goes on from there: only what is missing is run. Liger's
loss is a row if `liger-kernel` is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
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

from sparsebp_tools.bench.row import quartiles  # noqa: E402

FULL = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPES = {
    "wide": {"vocab_size": 32_768, "num_hidden_layers": 4, **FULL, "max_position_embeddings": 4096},
    "deep": {"vocab_size": 4096, "num_hidden_layers": 24, **FULL, "max_position_embeddings": 4096},
}
TINY = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
CASES = (*(f"wide-{kind}" for kind in ("instructions", "pairs", "groups", "tree")),)
CASES += (*(f"deep-{kind}" for kind in ("instructions", "chats", "groups")),)
# A mapping for each tensor above this size, and no end of them, so that resident memory is what is alive.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_MMAP_MAX_": "1000000000"}
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


def make_unit(kind: str, vocabulary: int, scale: int) -> Unit:
    """Return the examples of one kind of update."""
    draw = Draw(vocabulary, scale)
    match kind:
        case "instructions":
            return Unit(draw.alone(draw.lengths(8, 120, 0.7, 16, 400), 1 / 3), 4, shares_prompts=False)
        case "chats":
            return Unit(draw.alone(draw.lengths(8, 240, 0.6, 40, 640), 1 / 2), 4, shares_prompts=False)
        case "groups":
            prompts = [(draw.text(length), 4) for length in draw.lengths(3, 120, 0.2, 90, 160)]
            lengths = (40, 0.4, 8, 80)
        case "pairs":
            prompts = [(draw.text(length), 2) for length in draw.lengths(4, 80, 0.5, 24, 200)]
            lengths = (60, 0.6, 8, 140)
        case "tree":  # of an agent: a system message, its tasks, their turns, and leaves
            system = draw.text(96)
            tasks = [torch.cat([system, draw.text(24)]) for _ in range(2)]
            prompts = [(torch.cat([task, draw.text(32)]), 2) for task in tasks for _ in range(2)]
            lengths = (24, 0.4, 8, 48)
    examples = [one for prompt, number in prompts for one in draw.answers(prompt, draw.lengths(number, *lengths))]
    return Unit(tuple(examples), 4, shares_prompts=True)


def make_case(name: str, *, is_tiny: bool) -> tuple[Any, Unit]:
    """Return model and unit of a case."""
    shape, _, kind = name.partition("-")
    sizes = TINY if is_tiny else SHAPES[shape]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, use_cache=False)).train()
    return model, make_unit(kind, sizes["vocab_size"], 6 if is_tiny else 1)


def read_memory(key: str) -> int:
    """Return bytes of this process: resident now (``VmRSS``), or at most so far (``VmHWM``)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def hold(name: str, way: str, *, is_tiny: bool) -> int:
    """Return the most bytes that this process holds in a pass of a way, over what it holds before."""
    model, unit = make_case(name, is_tiny=is_tiny)
    with ExitStack() as stack:
        own, run = WAYS[way].prepare(model, unit, stack)
        for parameter in own.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            run()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins again
        before = read_memory("VmRSS")
        run()
        return read_memory("VmHWM") - before


def ask_held(name: str, way: str, *, is_tiny: bool) -> int:
    """Let a process of its own run a way, and return what it held."""
    words = [sys.executable, __file__, "--hold", name, way, *(["--tiny"] if is_tiny else [])]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | MAPPED)
    return int(done.stdout.split()[-1])


def count(model: Any, run: Callable[[], None], truth: list[Tensor]) -> dict[str, float]:
    """Return FLOPs and error of one pass."""
    model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        run()
    missed = sum(
        float((own.double() - true).square().sum()) for own, true in zip(find_gradient(model), truth, strict=True)
    )
    norm = sum(float(true.square().sum()) for true in truth)
    return {"flops": counter.get_total_flops(), "error": (missed / norm) ** 0.5}


def measure(
    model: Any,
    unit: Unit,
    found: dict[str, Any],
    rounds: int,
    save: Callable[[], None],
    ask: Callable[[str], int] | None = None,
) -> None:
    """Add to the rows of all ways what they lack, and save it whenever there is more; ``ask`` says what a way holds."""
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
            if ask is not None and "bytes" not in found[name]:
                found[name]["bytes"] = ask(name)
                save()
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


def about() -> dict[str, Any]:
    """Return what was measured on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return {"versions": versions, "machine": platform.machine(), "cores": os.cpu_count(), "shapes": SHAPES}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short texts: a test of this script")
    parser.add_argument("--case", action="append", choices=CASES, help="one kind of update; repeat it for several")
    parser.add_argument(
        "--hold", nargs=2, metavar=("CASE", "WAY"), help="print the bytes that this process holds, alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of each way")
    parser.add_argument("--out", type=Path, help="file of the result; default: benchmarks/results/peers.json")
    args = parser.parse_args()
    out = args.out or (None if args.tiny else ROOT / "benchmarks" / "results" / "peers.json")
    torch.set_num_threads(1)
    if args.hold:
        print(hold(*args.hold, is_tiny=args.tiny))
        return
    record = {"about": about(), "cases": {}}
    if out is not None and out.exists():
        record["cases"] = json.loads(out.read_text(encoding="utf-8"))["cases"]

    def save() -> None:
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    for name in args.case or CASES:
        model, unit = make_case(name, is_tiny=args.tiny)
        lengths = [len(example.token_T) for example in unit.examples]
        sizes = {"examples": len(lengths), "batch_size": unit.batch_size, "tokens": sum(lengths)}
        sizes |= {"labels": unit.num_labels, "parameters": model.num_parameters()}
        case = record["cases"].setdefault(name, sizes | {"load": [], "ways": {}})
        case["load"].append(round(os.getloadavg()[0], 1))
        measure(model, unit, case["ways"], args.rounds, save, partial(ask_held, name, is_tiny=args.tiny))
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
