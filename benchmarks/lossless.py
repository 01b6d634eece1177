"""Times whole steps of `lossless` beside the plain forms of the same step, on batches of several kinds.

    python benchmarks/lossless.py          # about ten minutes on two cores; writes benchmarks/results/lossless-cpu.json
    python benchmarks/lossless.py --tiny   # the same code in seconds; it measures nothing

A step is forward and backward. Every way computes the same loss and gradient. In every round each way runs once, in
another order, on the same batch and weights; a ratio is of one round. Plain forms: *padded* gives the labels to the
model; *rows* computes the head for labelled positions alone, by `logits_to_keep` and a loss of its own; *padding-free*
concatenates the examples, without padding, with position numbers that restart, and does as *rows* does. The counted
saving is that of FLOPs, forward and backward, by PyTorch's counter; the realised share is (1 - 1/speed-up) / (1 -
FLOPs' share), both over *padded*.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402
from sparsebp_tools.bench.row import quartiles  # noqa: E402
from sparsebp_tools.memory import memory_trace  # noqa: E402

WAYS = ("padded", "rows", "padding-free", "lossless")
IGNORED = -100
FULL = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
FULL |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1024}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}


@dataclass(frozen=True)
class Batch:
    """A batch, padded on the right."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @classmethod
    def of(cls, examples: Sequence[tuple[Tensor, int]]) -> Batch:
        """Return the batch of some examples, each with the number of tokens that are not trained."""
        length = max(len(ids) for ids, _ in examples)
        ids = torch.zeros(len(examples), length, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for number, (tokens, prompt) in enumerate(examples):
            ids[number, : len(tokens)] = tokens
            mask[number, : len(tokens)] = 1
            labels[number, prompt : len(tokens)] = tokens[prompt:]
        return cls(ids, mask, labels)


def make_cases(vocabulary: int, scale: int) -> dict[str, Batch]:
    """Return the batches by name; all lengths are divided by ``scale``."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randint(3, vocabulary, size, generator=generator)

    def complete(lengths: Sequence[int], share: float) -> Batch:
        return Batch.of([(draw(n), round(n * share)) for n in lengths])

    def share(num_prompts: int, num_answers: int, prompt: int, answer: int) -> Batch:
        prompts = [draw(prompt // scale) for _ in range(num_prompts)]
        answers = [draw(answer // scale) for _ in range(num_prompts * num_answers)]
        return Batch.of([(torch.cat((prompts[n // num_answers], a)), prompt // scale) for n, a in enumerate(answers)])

    # Of instructions: a median of about 100 tokens and a long tail, as log-normal lengths have.
    spread = torch.randn(8, generator=generator).mul(0.6).add(4.6).exp().clamp(16, 512).long()
    return {
        "half of each example is prompt": complete([256 // scale] * 4, 0.5),
        "nine tenths are prompt": complete([256 // scale] * 4, 0.9),
        "lengths of instructions, a third prompt": complete([max(4, int(n) // scale) for n in spread], 1 / 3),
        "pairs, prompt 192, answers 128": share(2, 2, 192, 128),
        "groups of 8, prompt 256, answers 64": share(1, 8, 256, 64),
        "nothing to leave out": complete([256 // scale] * 4, 0.0),
    }


def row_loss(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return the loss of a batch of one example, whose head is computed for labelled positions alone."""
    index = (labels[0, 1:] != IGNORED).nonzero().flatten()
    logits = model(**inputs, logits_to_keep=index, use_cache=False).logits[0]
    return nn.functional.cross_entropy(logits.float(), labels[0, index + 1])


def forward(model: nn.Module, batch: Batch, way: str) -> Tensor:
    """Return the loss."""
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    if way in ("padded", "lossless"):
        loss: Tensor = model(**inputs, labels=batch.labels, use_cache=False).loss
        return loss
    trained = batch.labels[:, 1:] != IGNORED
    if way == "rows":
        columns = trained.any(0).nonzero().flatten()
        logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits
        return nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels[:, 1:][:, columns].flatten(), ignore_index=IGNORED
        )
    real = batch.mask.bool()
    positions = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)[real][None]
    labels = batch.labels[real][None].masked_fill(positions == 0, IGNORED)
    return row_loss(model, {"input_ids": batch.ids[real][None], "position_ids": positions}, labels)


@dataclass(frozen=True)
class Arms:
    """The model, and a copy of it with the engine attached."""

    model: nn.Module
    packed: nn.Module
    engine: sbp.Engine

    def step(self, batch: Batch, way: str) -> float:
        """Run a step, and return its seconds."""
        model = self.packed if way == "lossless" else self.model
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = forward(model, batch, way)
        if way == "lossless":
            self.engine.backward(loss)
        else:
            loss.backward()
        return time.perf_counter() - start


def count(arms: Arms, batch: Batch, way: str) -> tuple[int, int]:
    """Return the FLOPs of a step, and its peak of live bytes, weights included."""
    model = arms.packed if way == "lossless" else arms.model
    with FlopCounterMode(display=False) as counter:
        arms.step(batch, way)
    model.zero_grad(set_to_none=True)
    with memory_trace(model) as trace:
        arms.step(batch, way)
    return int(counter.get_total_flops()), trace.peak.split.total


def measure(model: nn.Module, batch: Batch, rounds: int) -> list[dict[str, object]]:
    """Return a row for each way."""
    order, seconds = random.Random(0), {way: [] for way in WAYS}  # type: dict[str, list[float]]
    packed = copy.deepcopy(model)
    arms = Arms(model, packed, sbp.attach(packed, sbp.make_policy("lossless", verify="never")))
    for number in range(rounds + 1):
        for way in order.sample(WAYS, len(WAYS)):
            taken = arms.step(batch, way)
            if number:
                seconds[way].append(taken)
    counts = {way: count(arms, batch, way) for way in WAYS}
    rows: list[dict[str, object]] = []
    for way in WAYS:
        ratio = quartiles([own / plain for own, plain in zip(seconds[way], seconds["padded"], strict=True)])
        speedup, share = 1 / ratio.median, counts[way][0] / counts["padded"][0]
        realised = (1 - 1 / speedup) / (1 - share) if share < 0.98 else None
        rows.append(
            {
                "way": way,
                "seconds": quartiles(seconds[way]).model_dump(),
                "ratio": ratio.model_dump(),
                "speedup": speedup,
                "flops_share": share,
                "realised": realised,
                "peak_bytes": counts[way][1],
            }
        )
    return rows


def show(name: str, rows: list[dict[str, object]]) -> None:
    """Print the table of one case."""
    head = f"{'way':14}{'seconds':>9}{'speed-up':>10}{'ratio, quartiles':>22}{'FLOPs':>8}{'realised':>10}{'peak MB':>9}"
    print(f"\n{name}\n{head}")
    for row in rows:
        ratio, seconds = row["ratio"], row["seconds"]
        assert isinstance(ratio, dict)
        assert isinstance(seconds, dict)
        spread = f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
        realised = "" if row["realised"] is None else f"{row['realised']:.0%}"
        print(
            f"{row['way']:14}{seconds['median']:9.3f}{row['speedup']:9.2f}x{spread:>22}{row['flops_share']:8.0%}"
            f"{realised:>10}{int(str(row['peak_bytes'])) / 1e6:9.0f}",
            flush=True,
        )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each case")
    parser.add_argument("--only", default="", help="measure the cases whose name contains this, and write nothing")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short examples: a test of this script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "lossless-cpu.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(TINY if args.tiny else FULL), tie_word_embeddings=True)).train()
    found = {}
    for name, batch in make_cases(model.config.vocab_size, 8 if args.tiny else 1).items():
        if args.only not in name:
            continue
        found[name] = measure(model, batch, 2 if args.tiny else args.rounds)
        show(name, found[name])
    if not args.tiny and not args.only:
        machine = {"machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
        versions = {name: version(name) for name in ("torch", "transformers")}
        about = machine | versions | {"parameters": sum(p.numel() for p in model.parameters())}
        args.out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
