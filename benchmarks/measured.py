"""The measurements of ``gpu.py``: the model, the variants, their counts, the table."""

from __future__ import annotations

import argparse
import copy
import math
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import Waits

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import kernel
from sparsebp_tools.bench import BenchForm, BenchmarkRow, find_forms
from sparsebp_tools.bench.row import BenchCase
from sparsebp_tools.bench.subject import Count, Subject
from sparsebp_tools.bench.variant import Variant

KEEPS = (0.5, 0.25, 0.1)
FORMS = {  # site, execution: values of the policy's options
    "linears": [("fast", {"along": along}) for along in ("rows", "columns", "blocks", "2:4")],
}
SIZES: dict[str, dict[str, int]] = {
    "1b": {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def make_subject(device: torch.device, args: argparse.Namespace) -> tuple[Subject, int]:
    """Return model and batch, and the batch's size, which is halved until a plain step fits into the device's
    memory.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[args.size], max_position_embeddings=max(2048, args.length))  # type: ignore[arg-type]
    config.use_cache = False
    with device:
        model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).train()
    batch = args.batch
    while True:
        ids = torch.randint(0, config.vocab_size, (batch, args.length), device=device)
        subject = Subject(model, {"input_ids": ids, "labels": ids})
        try:
            subject.run(Variant("plain PyTorch"))
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
            subject.drop_gradients()
            torch.cuda.empty_cache()
        else:
            return subject, batch


def list_cases(args: argparse.Namespace) -> list[BenchCase]:
    """Return plain PyTorch first, the other variants to keep all gradients, then every form at every share."""
    found = [
        BenchCase(Variant("plain PyTorch")),
        BenchCase(Variant("compiled", compiler="inductor" if args.size == "1b" else "aot_eager")),
        BenchCase(Variant("full checkpointing", checkpointing="full")),
        BenchCase(Variant("dense, engine", "linears")),
    ]
    for form in find_forms("topk", keeps=KEEPS):
        if (form.execution, {"along": form.options["along"]}) in FORMS[form.site]:
            found += [_candidate(form, keep) for keep in form.keeps]
    return found


def _candidate(form: BenchForm, keep: float | None) -> BenchCase:
    label = f"{form.site}, {form.label} at {keep:g}"
    return BenchCase(Variant(label, form.site, form.make("topk", keep)), form, keep)


@dataclass(frozen=True)
class Entry:
    """A variant that runs here: its place in the table, its model and batch, and its counts."""

    case: BenchCase
    subject: Subject
    count: Count

    @property
    def variant(self) -> Variant:
        """The way to compute a step."""
        return self.case.variant


def count_all(subject: Subject, candidates: list[BenchCase], end: float = math.inf) -> tuple[list[Entry], list[str]]:
    """Count every variant, plain PyTorch first, until the end; return those that run here, and a line for each that
    does not.
    """
    own = Subject(copy.deepcopy(subject.model), subject.batch)  # to be compiled, so nothing may be attached to it
    found, notes = list[Entry](), list[str]()
    for case in candidates:
        variant = case.variant
        if found and time.monotonic() > end:
            notes.append(f"{variant.label}: no time was left")
            continue
        try:
            if variant.compiler is None:
                found.append(Entry(case, subject, subject.count(variant)))
            else:  # counters would prevent compilation; its counts are those of plain PyTorch
                found.append(Entry(case, own, own.count_memory(variant, like=found[0].count)))
        except Exception as error:  # no compiler on this machine, or too little memory
            if variant.compiler is None and not isinstance(error, torch.OutOfMemoryError):
                raise
            notes.append(
                f"{variant.label} does not run here: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            )
            subject.drop_gradients()
            own.drop_gradients()
    return found, notes


def find_late(waits: list[Waits]) -> list[str]:
    """Return a line for every engine variant that waits in its backward, or more often than plain PyTorch."""
    plain = waits[0]
    found = []
    for wait in waits:
        if not wait.is_engine or wait.known:
            continue
        if wait.in_backward:
            found.append(f"WAITS  {wait.label}: in the backward: {wait.in_backward}")
        elif wait.in_forward > plain.in_forward:
            found.append(f"WAITS  {wait.label}: {wait.in_forward} times in the forward, plain {plain.in_forward}")
        elif wait.total > plain.total:
            found.append(f"WAITS  {wait.label}: {wait.calls}, plain PyTorch {plain.calls}")
    return found


def print_table(rows: list[BenchmarkRow], waits: list[Waits], rounds: int) -> None:
    """Print one line a variant."""
    titles = {"kept": 6, "ms": 8, "speed-up": 10, "ceiling": 9, "realised": 10, "saved": 7, "peak": 6, "waits": 7}
    head = f"{'variant':<30}" + "".join(f"{title:>{width}}" for title, width in titles.items())
    print(f"forward + backward, median of {rounds} rounds; speed-up, saved and peak over plain PyTorch\n{head}")
    for row, wait in zip(rows, waits, strict=True):
        ceiling = "" if row.ceiling is None else f"{row.ceiling:.2f}x"
        realised = "" if row.realised_share is None else f"{row.realised_share:.0%}"
        print(
            f"{(f'{row.label}, {row.site}' if row.site else row.label):<30}{'' if row.keep is None else row.keep:>6}"
            f"{1000 * row.seconds.median:>8.1f}{row.speedup:>9.2f}x{ceiling:>9}{realised:>10}{row.saved_ratio:>7.2f}"
            f"{row.peak_ratio or 0.0:>6.2f}{wait.total:>7}"
        )


def describe(device: torch.device) -> dict[str, Any]:
    """Return the versions and hardware that the numbers depend on."""
    facts: dict[str, Any] = {"device": "cpu", "python": platform.python_version(), "machine": platform.machine()}
    names = ("torch", "transformers", "pydantic", "triton")
    facts["versions"] = {name: _version(name) for name in names}
    facts["triton_runs"] = "none on a CPU"
    if device.type == "cuda":
        runs = kernel.find(torch.ones(1, 1, device=device, dtype=torch.bfloat16), multiplies=True) is not None
        facts["triton_runs"] = "used" if runs else "not used"
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return facts


def choose(args: argparse.Namespace) -> None:
    """Fill in the arguments that were not given; raises ``UsageError`` if there is no such device."""
    is_tiny = args.size == "tiny"
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    if args.device == "cpu" and not is_tiny:
        raise UsageError("there is no CUDA device: --device cpu needs --tiny, which measures nothing")
    args.length, args.rounds = args.length or (32 if is_tiny else 2048), args.rounds or (1 if is_tiny else 20)
    args.minutes = args.minutes or (60.0 if is_tiny else 12.0)
    args.out = args.out or Path(__file__).parent / "results" / ("gpu-tiny.json" if is_tiny else "gpu.json")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
