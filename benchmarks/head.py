"""Counts the bytes and FLOPs of a step whose logits are its largest tensors: the head plain, by hand, and in tiles.

    python benchmarks/head.py          # seconds; writes benchmarks/results/head-cpu.json
    python benchmarks/head.py --tiny   # the same code on short texts

Bytes are the peak of a step over weights and their gradients: what the pass holds. FLOPs are counted as operators reach
the kernels, of the second step on the batch. No clock is read. "By hand" runs the head for labelled rows of one
padding-free row; PyTorch's ``linear_cross_entropy`` gets the same rows. Its products are hidden from every counter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402
from sparsebp_cli.backward import count_flops  # noqa: E402
from sparsebp_tools.memory import memory_trace  # noqa: E402

IGNORED = -100
MODEL = {"vocab_size": 16_384, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
LENGTHS = (200, 160, 120, 96, 72, 48)  # a third of each is prompt
CASES = {"all trained, float32": ("", torch.float32), "head and embeddings frozen, float32": ("head", torch.float32)}
CASES |= {"all trained, bfloat16": ("", torch.bfloat16)}
EQUAL = "texts of one length without a prompt, float32"  # of which nothing can be left out
CASES |= {EQUAL: ("", torch.float32)}


def make_batch(lengths: tuple[int, ...], vocabulary: int) -> dict[str, Tensor]:
    """Return texts padded on the right, (B, T); texts of one length are trained as a whole."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)), generator=generator)
    position, length = torch.arange(ids.shape[1]).expand_as(ids), torch.tensor(lengths)[:, None]
    is_prompt = (position < length // 3) & (len(set(lengths)) > 1)
    labels = ids.masked_fill((position >= length) | is_prompt, IGNORED)
    mask = position < length
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def find_rows(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the hidden states (R, D) of labelled rows of one padding-free row, and their labels (R)."""
    real = batch["attention_mask"].bool()
    position = torch.arange(real.shape[1]).expand(real.shape)[real][None]
    hidden = model.model(input_ids=batch["input_ids"][real][None], position_ids=position, use_cache=False)
    labels = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:][real]
    return hidden.last_hidden_state[0][labels != IGNORED], labels[labels != IGNORED]


def run_plain(model: Any, batch: dict[str, Tensor]) -> None:
    """Run the padded step."""
    model(**batch, use_cache=False).loss.backward()


def run_by_hand(model: Any, batch: dict[str, Tensor]) -> None:
    """Run a step whose head sees labelled rows alone."""
    rows_RD, label_R = find_rows(model, batch)
    nn.functional.cross_entropy(model.lm_head(rows_RD).float(), label_R).backward()


def run_torch(model: Any, batch: dict[str, Tensor]) -> None:
    """Run the same with PyTorch's loss in chunks."""
    rows_RD, label_R = find_rows(model, batch)
    options = nn.LinearCrossEntropyOptions()
    nn.functional.linear_cross_entropy(rows_RD, model.lm_head.weight, label_R, options=options).float().backward()


def measure(model: Any, run: Callable[[], None]) -> tuple[dict[str, float], Tensor]:
    """Return the counts of a step, and its gradient as one vector."""
    run()
    model.zero_grad(set_to_none=True)
    with count_flops() as count:
        run()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    with memory_trace(model) as trace:
        run()
    split = trace.peak.split
    return {"flops": count.total, "bytes": split.activations + split.workspace}, gradient


def measure_case(sizes: dict[str, int], lengths: tuple[int, ...], frozen: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the counts of every way, and the largest error of a gradient against the padded step in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).train()
    for layer in (model.lm_head, model.model.embed_tokens):
        layer.requires_grad_(not frozen)
    batch, found, gradients = make_batch(lengths, sizes["vocab_size"]), {}, {}
    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: run_plain(model, batch),
        "by hand": lambda: run_by_hand(model, batch),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):  # PyTorch 2.13
        ways["torch"] = lambda: run_torch(model, batch)
    for way, run in ways.items():
        found[way], gradients[way] = measure(model, run)
    for logits in ("whole", "tiles"):
        with sbp.attach(model, sbp.make_policy("lossless", verify="never", logits=logits)) as engine:

            def step(engine: sbp.Engine = engine) -> None:
                engine.backward(model(**batch, use_cache=False).loss)

            found[logits], gradients[logits] = measure(model, step)
    wide = model.float()
    wide.zero_grad(set_to_none=True)
    run_plain(wide, batch)
    exact = torch.cat([p.grad.flatten() for p in wide.parameters() if p.grad is not None])
    for way, gradient in gradients.items():
        found[way]["error"] = float((gradient - exact).norm() / exact.norm())
    return found


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="short texts: a test of this script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "head-cpu.json")
    args = parser.parse_args()
    sizes, lengths = dict(MODEL), tuple(length // 8 for length in LENGTHS) if args.tiny else LENGTHS
    if args.tiny:
        sizes |= {"vocab_size": 203, "hidden_size": 32, "intermediate_size": 48}
    found = {}
    for name, (frozen, dtype) in CASES.items():
        own = (sum(lengths) // len(lengths),) * len(lengths) if name == EQUAL else lengths
        found[name] = measure_case(sizes, own, frozen, dtype)
        for way, row in found[name].items():
            print(f"{name}, {way}: {row['bytes'] / 1e6:.1f} MB, {row['flops'] / 1e6:,.0f} MFLOP, {row['error']:.0e}")
    if not args.tiny:
        about = {name: version(name) for name in ("torch", "transformers")} | {"model": sizes}
        args.out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
