"""Counts what a step computes where few positions have a label: `tokens` in mode exact, `lossless`, and both.

    python benchmarks/labels.py          # seconds; writes benchmarks/results/labels-cpu.json
    python benchmarks/labels.py --tiny   # the same code on short texts

FLOPs by PyTorch's counter, of the second step on each batch: in the first one `lossless` tries its last layer, and it
compares none. No clock is read. Every way has the labels of the same loss; the error is that of the whole gradient
against the padded step. "By hand" runs the head for labelled positions alone, which is two lines in a loop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402

IGNORED = -100
MODEL = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024}
SMALL = {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WAYS = {"tokens": ("tokens",), "lossless": ("lossless",), "both": ("tokens", "lossless")}
OPTIONS: Mapping[str, dict[str, Any]] = {"tokens": {"score": "mask", "mode": "exact"}, "lossless": {"verify": "never"}}
Batch = dict[str, Tensor]


def make_batch(lengths: list[int], is_trained: Callable[[Tensor, torch.Generator], Tensor], vocabulary: int) -> Batch:
    """Return examples padded on the right; ``is_trained`` marks labels by the number of their position, (B, T)."""
    generator = torch.Generator().manual_seed(0)
    size = max(lengths)
    ids = torch.randint(3, vocabulary, (len(lengths), size), generator=generator)
    position = torch.arange(size).expand_as(ids)
    mask = position < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask | ~is_trained(position, generator), IGNORED)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def make_batches(scale: int, vocabulary: int) -> Mapping[str, Batch]:
    """Return the kinds of batches by name; lengths are divided by ``scale``."""

    def share(kept: float) -> Callable[[Tensor, torch.Generator], Tensor]:
        return lambda position, generator: torch.rand(position.shape, generator=generator) < kept

    def batch(lengths: list[int], is_trained: Callable[[Tensor, torch.Generator], Tensor]) -> Batch:
        return make_batch([length // scale for length in lengths], is_trained, vocabulary)

    turn = 16 // scale
    groups = batch([160] * 8, lambda position, _: position >= 128 // scale)
    for first in (0, 4):
        groups["input_ids"][first : first + 4, : 128 // scale] = groups["input_ids"][first, : 128 // scale]
    return {
        "a tenth of the labels, scattered": batch([96] * 4, share(0.1)),
        "half of the labels, scattered": batch([96] * 4, share(0.5)),
        "nine tenths, scattered": batch([96] * 4, share(0.9)),
        "chats of 4 to 12 turns, the answers trained": batch(
            [192, 160, 128, 96, 80, 64], lambda position, _: position // turn % 2 == 1
        ),
        "lengths of 8 to 128, all trained": batch([128, 80, 64, 48, 32, 24, 16, 8], share(1.0)),
        "two groups of 4, prompt 128, answers 32": groups,
    }


def run_plain(model: Any, batch: Batch) -> None:
    """Run the padded step."""
    model(**batch, use_cache=False).loss.backward()


def run_by_hand(model: Any, batch: Batch) -> None:
    """Run a step whose head sees positions with a label alone."""
    trained = batch["labels"][:, 1:] != IGNORED
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    logits = model.lm_head(hidden.last_hidden_state[:, :-1][trained])
    nn.functional.cross_entropy(logits, batch["labels"][:, 1:][trained]).backward()


def count(model: Any, run: Callable[[], None]) -> tuple[int, Tensor]:
    """Return the FLOPs of a step and its gradient as one vector."""
    model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops(), torch.cat([p.grad.flatten() for p in model.parameters()])


def measure(batch: Batch, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the FLOPs of every way, and the largest error of a gradient."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
    plain, wanted = count(model, lambda: run_plain(model, batch))
    found: dict[str, float] = {"plain": plain, "by hand": count(model, lambda: run_by_hand(model, batch))[0]}
    error = 0.0
    for way, names in WAYS.items():
        with sbp.attach(model, [sbp.make_policy(name, **OPTIONS[name]) for name in names]) as engine:

            def step(engine: sbp.Engine = engine) -> None:
                engine.backward(model(**batch, use_cache=False).loss)

            count(model, step)
            found[way], gradient = count(model, step)
        error = max(error, float((gradient - wanted).norm() / wanted.norm()))
    return found | {"error": error}


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="short texts: a test of this script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "labels-cpu.json")
    args = parser.parse_args()
    sizes, found = MODEL | (SMALL if args.tiny else {}), {}
    for name, batch in make_batches(2 if args.tiny else 1, sizes["vocab_size"]).items():
        found[name] = row = measure(batch, sizes)
        shares = ", ".join(f"{way} {row[way] / row['plain']:.3f}" for way in ("by hand", *WAYS))
        print(f"{name}\n  {row['plain'] / 1e6:.0f} MFLOP; {shares}; gradient {row['error']:.0e}")
    if not args.tiny:
        about = {name: version(name) for name in ("torch", "transformers")} | {"model": sizes}
        args.out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
