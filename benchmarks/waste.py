"""Counts what `lossless` leaves out of whole updates: forwards without a gradient, and examples of weight zero.

    python benchmarks/waste.py          # a minute; writes benchmarks/results/waste-cpu.json
    python benchmarks/waste.py --tiny   # the same code on short texts

FLOPs by PyTorch's counter, of one update after the first two, in which `lossless` compares. No clock is read. Every
update is one of a loop of one's own, plainly padded and with `lossless`; the error is that of the whole gradient
against the gradient of one example at a time, without padding.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
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
MODEL = {"vocab_size": 203, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024}


@dataclass(frozen=True)
class Batch:
    """Answers to prompts, padded on the right, and the weight of each in the loss."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    weight_B: Tensor

    @classmethod
    def of(cls, prompts: int, answers: int, prompt: int, lengths: list[int], weights: list[float]) -> Batch:
        """Return ``answers`` to each of ``prompts``, of ``prompt`` tokens each."""
        generator = torch.Generator().manual_seed(0)
        size = prompt + max(lengths)
        ids = torch.randint(3, MODEL["vocab_size"], (prompts * answers, size), generator=generator)
        ids[:, :prompt] = ids[::answers, :prompt].repeat_interleave(answers, 0)
        mask = torch.arange(size) < prompt + torch.tensor(lengths)[:, None]
        labels = ids.masked_fill(~mask | (torch.arange(size) < prompt), IGNORED)
        return cls(ids.masked_fill(~mask, 0), mask.long(), labels, torch.tensor(weights))

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of a forward."""
        return {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}


def log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Return the log-probability of each label, (B, T - 1), 0 where there is none."""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch.labels[:, 1:], reduction="none")
    return -losses


def preference_loss(own: Tensor, reference: Tensor, _: Batch) -> Tensor:
    """DPO's, of neighbouring pairs."""
    margins = (own - reference).sum(1).view(-1, 2)
    return -nn.functional.logsigmoid(0.1 * (margins[:, 0] - margins[:, 1])).mean()


def policy_loss(own: Tensor, old: Tensor, batch: Batch) -> Tensor:
    """GRPO's without a divergence, by tokens."""
    return -((own - old).exp() * batch.weight_B[:, None] * (batch.labels[:, 1:] != IGNORED)).sum() / len(own)


@dataclass(frozen=True)
class Update:
    """One kind of update."""

    batch: Batch
    loss: Callable[[Tensor, Tensor, Batch], Tensor] | None  # None: an evaluation, of the forward's own loss
    scores: tuple[str, ...]  # forwards without a gradient before it: of the policy, of its reference
    weighs: bool = False


def make_updates(scale: int) -> dict[str, Update]:
    """Return the kinds of updates by name; lengths are divided by ``scale``."""
    generator = torch.Generator().manual_seed(1)

    def lengths(number: int, least: int, most: int) -> list[int]:
        return (torch.randint(least, most + 1, (number,), generator=generator) // scale).tolist()

    groups = [1.0, -1, 0.5, -0.5, *[0.0] * 4, -1, 1, 1, -1, *[0.0] * 4]
    eights = [*([1.0, -1, 0.5, -0.5] * 2), *[0.0] * 8, *([1.0, -1, 0.5, -0.5] * 2), *[0.0] * 8, *([1.0, -1] * 4)]
    pairs = Batch.of(4, 2, 96 // scale, lengths(8, 16, 32), [1.0] * 8)
    return {
        "DPO of 4 pairs, prompt 96, answers 16 to 32, with its reference": Update(
            pairs, preference_loss, ("reference",)
        ),
        "GRPO of 4 groups of 4, prompt 48, answers 32, two groups without advantage": Update(
            Batch.of(4, 4, 48 // scale, [32 // scale] * 16, groups), policy_loss, (), weighs=True
        ),
        "GRPO of 5 groups of 8, prompt 128, answers 32, two groups without advantage, with old and reference": Update(
            Batch.of(5, 8, 128 // scale, [32 // scale] * 40, eights), policy_loss, ("policy", "reference"), weighs=True
        ),
        "evaluation of 8 examples, lengths of 16 to 160, a prompt in common": Update(
            Batch.of(1, 8, 48 // scale, lengths(8, 16, 112), [1.0] * 8), None, ()
        ),
    }


def run(model: nn.Module, reference: nn.Module, update: Update, engine: sbp.Engine | None) -> Tensor | None:
    """Run one update, or an evaluation. Return what was scored, for the loss of one example at a time."""
    batch, scored = update.batch, None
    # What the loss multiplies by zero is not read.
    read = batch.labels.masked_fill((batch.weight_B == 0)[:, None], IGNORED) if update.weighs else batch.labels
    with torch.no_grad(), nullcontext() if engine is None else engine.scoring(read):
        if update.loss is None:
            model(**batch.inputs, labels=batch.labels)
        for name in update.scores:
            scored = log_probs((model if name == "policy" else reference)(**batch.inputs).logits, batch)
    if update.loss is None:
        return None
    if engine is not None:
        engine.columns(labels=batch.labels, **({"example_weight": batch.weight_B} if update.weighs else {}))
    own = log_probs(model(**batch.inputs).logits, batch)
    loss = update.loss(own, own.detach() if scored is None else scored, batch)
    loss.backward() if engine is None else engine.backward(loss)
    return scored


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient as one vector, and forget it."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def alone(model: nn.Module, reference: nn.Module, update: Update) -> Tensor:
    """Return the gradient of an update whose examples were run one at a time, without padding."""
    batch, size = update.batch, update.batch.ids.shape[1]

    def score(module: nn.Module) -> Tensor:
        rows = []
        for ids, mask in zip(batch.ids, batch.mask.bool(), strict=True):
            logits = module(input_ids=ids[mask][None], use_cache=False).logits
            rows.append(nn.functional.pad(logits, (0, 0, 0, size - logits.shape[1])))
        return log_probs(torch.cat(rows), batch)

    assert update.loss is not None
    scored = None
    with torch.no_grad():
        for name in update.scores:
            scored = score(model if name == "policy" else reference)
    own = score(model)
    update.loss(own, own.detach() if scored is None else scored, batch).backward()
    return gradient(model)


def measure(update: Update) -> dict[str, float]:
    """Return the FLOPs of both ways and the error of the gradient."""
    torch.manual_seed(0)
    model, reference = (LlamaForCausalLM(LlamaConfig(**MODEL)) for _ in range(2))
    model.train()
    reference.eval()
    found = {"plain": _count(model, reference, update, None)}
    if update.loss is not None:
        model.zero_grad(set_to_none=True)
        wanted = alone(model, reference, update)
    packed, beside = copy.deepcopy(model), copy.deepcopy(reference)
    with sbp.attach(packed, "lossless", reference=beside) as engine:
        for _ in range(2):
            run(packed, beside, update, engine)
            packed.zero_grad(set_to_none=True)
        found["lossless"] = _count(packed, beside, update, engine)
    if update.loss is not None:
        found["error"] = float((gradient(packed) - wanted).norm() / wanted.norm())
    return found


def _count(model: nn.Module, reference: nn.Module, update: Update, engine: sbp.Engine | None) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model, reference, update, engine)
    return int(counter.get_total_flops())


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="short texts: a test of this script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "waste-cpu.json")
    args = parser.parse_args()
    found = {}
    for name, update in make_updates(4 if args.tiny else 1).items():
        found[name] = row = measure(update)
        error = f", gradient {row['error']:.0e}" if "error" in row else ""
        plain, own = row["plain"], row["lossless"]
        print(f"{name}\n  {plain / 1e6:.0f} MFLOP, {own / 1e6:.0f}: {own / plain:.3f}{error}")
    if not args.tiny:
        about = {name: version(name) for name in ("torch", "transformers")} | {"model": MODEL}
        args.out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
