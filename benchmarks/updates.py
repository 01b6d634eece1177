"""Counts what `lossless` computes and holds of a policy update of several micro-batches.

    python benchmarks/updates.py          # a minute; writes benchmarks/results/updates-cpu.json
    python benchmarks/updates.py --tiny   # the same code on short texts

An update as GRPO makes it: answers to a few prompts, in micro-batches, at random or by prompt. FLOPs by PyTorch's
counter; bytes are the most that autograd holds at one time, counted as they come and go. No clock is read. The error is
that of the whole gradient against one example at a time, without padding.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from live_bytes import live_bytes  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402

IGNORED = -100
MODEL = {"vocab_size": 203, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024}
PROMPTS, ANSWERS, SIZE = 4, 8, 4  # of the update, to each, and examples of a micro-batch
WAYS = ("plain", "batch", "update")


def make_rows(scale: int) -> list[tuple[Tensor, int, float]]:
    """Return (tokens, length of the prompt, advantage) of each answer."""
    generator = torch.Generator().manual_seed(0)
    prompt, rows = 128 // scale, []
    for _ in range(PROMPTS):
        begin = torch.randint(3, MODEL["vocab_size"], (prompt,), generator=generator)
        for answer in range(ANSWERS):
            size = int(torch.randint(16 // scale, 48 // scale + 1, (1,), generator=generator))
            rest = torch.randint(3, MODEL["vocab_size"], (size,), generator=generator)
            rows.append((torch.cat((begin, rest)), prompt, 1.0 - 2.0 * (answer % 2)))
    return rows


def collate(rows: list[tuple[Tensor, int, float]]) -> dict[str, Tensor]:
    """Return a micro-batch, padded on the right."""
    size = max(len(ids) for ids, _, _ in rows)
    ids_BT = torch.stack([nn.functional.pad(ids, (0, size - len(ids))) for ids, _, _ in rows])
    mask_BT = torch.arange(size) < torch.tensor([len(ids) for ids, _, _ in rows])[:, None]
    prompt_BT = torch.arange(size) < torch.tensor([prompt for _, prompt, _ in rows])[:, None]
    return {
        "input_ids": ids_BT,
        "attention_mask": mask_BT.long(),
        "labels": ids_BT.masked_fill(~mask_BT | prompt_BT, IGNORED),
        "advantage": torch.tensor([advantage for _, _, advantage in rows]),
    }


def policy_loss(model: nn.Module, batch: dict[str, Tensor], count: int) -> Tensor:
    """GRPO's of the first step on its answers: the ratio of probabilities is 1, and carries the gradient."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    labels = batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    ratio = (losses.detach() - losses).exp() * batch["advantage"][:, None]
    return -(ratio * (labels != IGNORED)).sum() / count


def update(model: nn.Module, batches: list[dict[str, Tensor]], count: int, engine: sbp.Engine | None) -> None:
    """Run forward and backward of all micro-batches."""
    if engine is not None:
        engine.expect(batches)
    for batch in batches:
        if engine is not None:
            engine.columns(labels=batch["labels"])
        loss = policy_loss(model, batch, count)
        loss.backward() if engine is None else engine.backward(loss)


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient as one vector, and forget it."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def measure(way: str, rows: list[tuple[Tensor, int, float]], wanted: Tensor, count: int) -> dict[str, float]:
    """Return FLOPs, bytes and the error of one way."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation="eager")).train()  # whose products are counted
    batches = [collate(rows[start : start + SIZE]) for start in range(0, len(rows), SIZE)]
    policy = sbp.make_policy("lossless", prefixes="update" if way == "update" else "share")
    engine = None if way == "plain" else sbp.attach(model, policy)
    for _ in range(2):  # in the first, `lossless` compares
        update(model, batches, count, engine)
        model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        update(model, batches, count, engine)
    found = gradient(model)
    with live_bytes(model.parameters()) as live:
        update(model, batches, count, engine)
    error = float((found - wanted).norm() / wanted.norm())
    return {"flops": int(counter.get_total_flops()), "bytes": live.peak, "error": error}


def alone(rows: list[tuple[Tensor, int, float]], count: int) -> Tensor:
    """Return the gradient of one example at a time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation="eager")).train()
    for row in rows:
        policy_loss(model, collate([row]), count).backward()
    return gradient(model)


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="short texts: a test of this script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "updates-cpu.json")
    args = parser.parse_args()
    rows = make_rows(4 if args.tiny else 1)
    count = sum(len(ids) - prompt for ids, prompt, _ in rows)
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    wanted, found = alone(rows, count), {}
    for order, given in (("at random", [rows[number] for number in drawn]), ("by prompt", rows)):
        found[order] = {way: measure(way, given, wanted, count) for way in WAYS}
        plain = found[order]["plain"]
        for way, row in found[order].items():
            share, held = row["flops"] / plain["flops"], row["bytes"] / plain["bytes"]
            print(f"{order}, {way}: {share:.3f} of the FLOPs, {held:.3f} of the bytes, gradient {row['error']:.0e}")
    if not args.tiny:
        about = {name: version(name) for name in ("torch", "transformers")} | {"model": MODEL}
        args.out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
