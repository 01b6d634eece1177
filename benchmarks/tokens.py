"""Times whole steps that train part of the tokens: dense, the loss mask alone, token selection exact and detached.

    python benchmarks/tokens.py          # about fifteen minutes on two cores; writes benchmarks/results/tokens-cpu.json
    python benchmarks/tokens.py --tiny   # the same code in seconds; it measures nothing

A step is forward and backward. In every round each way runs once, in another order, on the same batch and weights; a
ratio is of one round. The ceiling is the speed-up if time went with FLOPs, from what the policy claims; the realised
share is (1 - 1/speed-up) / (1 - 1/ceiling). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, PassCount, Proof, count_flops, saved_bytes
from sparsebp_cli.backward.observe.flops import DensePass
from sparsebp_cli.plan import reached_share, speedup_limit
from sparsebp_tools.bench import RoundQuartiles
from sparsebp_tools.bench.row import quartiles

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("dense", "loss mask", "exact", "detach")
LAYOUTS = ("contiguous", "scattered")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6, "intermediate_size": 1408, "num_key_value_heads": 8},
    "phi": {"num_hidden_layers": 6, "intermediate_size": 2048, "num_key_value_heads": 8, "resid_pdrop": 0.0},
}
FULL = {"vocab_size": 4096, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 512}
TINY = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
TINY |= {"intermediate_size": 96, "num_key_value_heads": 4, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Row:
    """One way in one case.

    Args:
        family: Shape of the model.
        layout: Arrangement of the trained positions, such as ``scattered``.
        keep: Number of an example's targets that are trained.
        way: Key of ``WAYS``.
        seconds: Seconds of a step.
        ratio: Seconds over those of dense in the same round.
        speedup: 1 / median ratio.
        ceiling: See the module; 1 where nothing is claimed.
        realised: Share of the saving; None where none is claimed.
        flops: FLOPs executed in a step.
        saved_bytes: Bytes kept between forward and backward.
    """

    family: str
    layout: str
    keep: int
    way: str
    seconds: RoundQuartiles
    ratio: RoundQuartiles
    speedup: float
    ceiling: float
    realised: float | None
    flops: int
    saved_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it is written."""
        return vars(self) | {"seconds": self.seconds.model_dump(), "ratio": self.ratio.model_dump()}


@dataclass(frozen=True)
class Case:
    """A model, and a batch of which some positions are trained."""

    model: nn.Module
    ids: Tensor
    labels: Tensor

    @contextmanager
    def under(self, way: str) -> Iterator[Any]:
        """Attach the engine that a way needs; yields it, or None."""
        if way not in ("exact", "detach"):
            yield None
            return
        with sbp.attach(self.model, [sbp.make_policy("tokens", score="mask", mode=way)]) as engine:
            yield engine

    def forward(self, way: str) -> Tensor:
        """Return the loss of a step."""
        loss: Tensor = self.model(input_ids=self.ids, labels=self.ids if way == "dense" else self.labels).loss
        return loss

    def time(self, way: str) -> float:
        """Return the seconds of a step."""
        with self.under(way) as engine:
            self.model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            loss = self.forward(way)
            loss.backward() if engine is None else engine.backward(loss)
            return time.perf_counter() - start

    def count(self, way: str) -> tuple[int, int, float]:
        """Return executed FLOPs, saved bytes and ceiling."""
        with self.under(way) as engine:
            policy, _ = self._count(way, engine)
            if engine is None:
                return policy.flops.total, policy.saved.total, 1.0
            with engine.disabled():
                dense, dense_pass = self._count(way, None)
            claims = [part.claim(dense_pass) for part in engine.extensions if "claim" in part.hooks]
            proof = Proof.of(self.model, dense, policy, engine.report(), claims)
            assert proof.claimed_flops is not None
            forward, backward = dense.flops.forward.total(), dense.flops.backward.total()
            highest = speedup_limit(forward, backward, proof.claimed_flops, proof.claimed_forward_flops)
            return policy.flops.total, policy.saved.total, highest

    def _count(self, way: str, engine: Any) -> tuple[PassCount, DensePass]:
        self.model.zero_grad(set_to_none=True)
        with ModuleTrace(self.model) as trace, count_flops(trace) as flops:
            with saved_bytes(self.model.parameters(), trace) as saved:
                loss = self.forward(way)
            loss.backward() if engine is None else engine.backward(loss)
            return PassCount(flops, saved), DensePass(loss, trace, flops)


def make_model(family: str, *, tiny: bool) -> nn.Module:
    """Return a decoder with random weights."""
    torch.manual_seed(0)
    options = SHAPES[family] | FULL | (TINY if tiny else {})
    config = AutoConfig.for_model(family, **options, use_cache=False)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return model


def make_case(model: nn.Module, layout: str, keep: int, *, batch: int, length: int) -> Case:
    """Return a batch in which ``keep`` targets of each example are trained."""
    generator = torch.Generator().manual_seed(keep)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
    labels = torch.full_like(ids, -100)
    for example in range(batch):
        chosen = torch.arange(length - keep, length)
        if layout == "scattered":
            chosen = torch.randperm(length - 1, generator=generator)[:keep] + 1  # the first token is never a target
        labels[example, chosen] = ids[example, chosen]
    return Case(model, ids, labels)


def measure(case: Case, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Return the seconds of every way, round by round."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    shuffle = random.Random(0)
    for number in range(warmup + rounds):
        for way in shuffle.sample(WAYS, len(WAYS)):
            spent = case.time(way)
            if number >= warmup:
                seconds[way].append(spent)
    return seconds


def rows_of(case: Case, name: tuple[str, str, int], seconds: dict[str, list[float]]) -> list[Row]:
    """Return the rows of a case."""
    rows = []
    for way in WAYS:
        flops, saved, highest = case.count(way)
        ratio = quartiles([mine / dense for mine, dense in zip(seconds[way], seconds["dense"], strict=True)])
        share = reached_share(1.0, ratio.median, highest)
        speedup = round(1.0 / ratio.median, 3)
        rounded = None if share is None else round(share, 3)
        rows.append(Row(*name, way, quartiles(seconds[way]), ratio, speedup, round(highest, 3), rounded, flops, saved))
    return rows


def show(rows: Sequence[Row], length: int) -> str:
    """Return a table of at most 100 columns."""
    head = f"{'model':6} {'layout':10} {'kept':>9} {'way':9} {'seconds':>8} {'IQR':>15}"
    lines = [f"{head} {'speedup':>8} {'ceiling':>8} {'realised':>9} {'saved MB':>9}"]
    for row in rows:
        kept = f"{row.keep} of {length}"
        spread = f"{row.seconds.low:.3f} to {row.seconds.high:.3f}"
        realised = "" if row.realised is None else f"{row.realised:.2f}"
        left = f"{row.family:6} {row.layout:10} {kept:>9} {row.way:9} {row.seconds.median:8.3f} {spread:>15}"
        lines.append(f"{left} {row.speedup:8.2f} {row.ceiling:8.2f} {realised:>9} {row.saved_bytes / 1e6:9.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a model and rounds that measure nothing")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those (default 2)")
    parser.add_argument("--batch", type=int, default=2, help="examples (default 2)")
    parser.add_argument("--family", choices=list(SHAPES), action="append", help="one shape alone; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "tokens-cpu.json")
    args = parser.parse_args(arguments)
    length = 64 if args.tiny else 512
    rounds, warmup = (2, 0) if args.tiny else (args.rounds, args.warmup)
    rows: list[Row] = []
    for family in args.family or SHAPES:
        model = make_model(family, tiny=args.tiny)
        for keep in (length // 2, length // 10, 2):
            for layout in LAYOUTS:
                case = make_case(model, layout, keep, batch=args.batch, length=length)
                rows += rows_of(case, (family, layout, keep), measure(case, rounds, warmup))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "length": length,
        "batch": args.batch,
        "rounds": rounds,
        "num_parameters_of_last": parameters,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "is_tiny": args.tiny,
    }
    args.out.write_text(json.dumps({"facts": facts, "rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    print(show(rows, length))


if __name__ == "__main__":
    main()
