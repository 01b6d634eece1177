"""Carries a request out: builds the model, lets all forms take turns, counts, and sums up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.bench import Benchmark, Request
from sparsebp_cli.errors import DataError
from sparsebp_cli.worker.bench.row import Candidate, break_evens, make_row
from sparsebp_cli.worker.bench.subject import Subject
from sparsebp_cli.worker.bench.turn import take_turns
from sparsebp_cli.worker.bench.way import CSR_ALWAYS, CSR_NEVER, Way
from sparsebp_cli.worker.environment import describe_environment
from sparsebp_cli.worker.model import build_model, build_tokenizer

COUNT_PASSES = 3  # that counting is worth in time: one under counters, one under the profiler
CLASSES = 2  # of a classification head, whose own cost is none


def measure(request: Request, tell: Callable[[str, int, int], None]) -> Benchmark:
    """Measure every form.

    Args:
        request: What is asked for.
        tell: Is told what comes now, and how many of how many passes are done.

    Returns:
        What was found.

    Raises:
        DataError: The model cannot be had, or not at this length, or there is no such device.
    """
    load = [round(value, 2) for value in psutil.getloadavg()]  # before this process adds to it
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    candidates = list_candidates(request)
    ways = [candidate.way for candidate in candidates]
    total, done = len(ways) * (COUNT_PASSES + request.warmup + request.rounds), 0
    tell("loading the model", done, total)
    subject = build_subject(request)

    def watch(what: str) -> None:
        nonlocal done
        tell(what, done, total)
        done += 1

    counts = []
    for way in ways:
        watch(f"counting: {way.label}")
        counts.append(subject.count(way))
        done += COUNT_PASSES - 1
    found = take_turns([(subject, way) for way in ways], rounds=request.rounds, warmup=request.warmup, watch=watch)
    tell("summing up", total, total)
    rows = [
        make_row(candidate, count, passes, counts[0], found[0])
        for candidate, count, passes in zip(candidates, counts, found, strict=True)
    ]
    return Benchmark(
        request=request,
        model=_describe(subject, request),
        machine=describe_environment() | {"threads": torch.get_num_threads(), "load_average": load} | _describe_cpu(),
        rows=rows,
        break_evens=break_evens(request.forms, rows),
    )


def build_subject(request: Request) -> Subject:
    """Build the model and a batch of random tokens: which tokens they are changes no time.

    Args:
        request: What is asked for.

    Returns:
        Model and batch on their device.

    Raises:
        DataError: See :func:`measure`.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if request.device == "cuda" and not torch.cuda.is_available():
        raise DataError("target.device: cuda, but torch finds no CUDA device here; use auto or cpu")
    device = "cuda" if request.device != "cpu" and torch.cuda.is_available() else "cpu"
    set_seed(request.seed)
    tokenizer = build_tokenizer(request.model)
    model = build_model(request.model, tokenizer, CLASSES if request.classification else None)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and request.length > longest:
        raise DataError(f"--length must be at most {longest} for this model, got {request.length}")
    shape, generator = (request.batch, request.length), torch.Generator().manual_seed(request.seed)
    ids_BT = torch.randint(0, len(tokenizer), shape, generator=generator)
    batch: dict[str, Tensor] = {"input_ids": ids_BT, "labels": ids_BT}
    if request.classification:
        batch["labels"] = torch.arange(request.batch) % CLASSES
    autocast = torch.bfloat16 if request.mixed_precision == "bf16" else None
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers' wrapper hides the overloads
    return Subject(model, {key: value.to(device) for key, value in batch.items()}, autocast)


def list_candidates(request: Request) -> list[Candidate]:
    """Return plain PyTorch, the other ways to keep all gradients, then every form at every share.

    Args:
        request: What is asked for.

    Returns:
        At least two; plain PyTorch is the first.
    """
    sites = list(dict.fromkeys(form.site for form in request.forms))
    found = [Candidate(Way("plain PyTorch"))]
    if "branches" in sites:
        found.append(Candidate(Way("full checkpointing", checkpointing="full")))
    found += [Candidate(Way("dense, engine", site, exclude=request.exclude)) for site in sites]
    for form in request.forms:
        for keep in form.keeps:
            way = Way(
                f"{form.site}, {form.label}" + ("" if keep is None else f" at {keep:g}"),
                form.site,
                form.make(request.policy, keep),
                checkpointing="sparse" if form.execution == "recomputed" else "none",
                csr_below={"csr": CSR_ALWAYS, "masked": CSR_NEVER}.get(form.execution),
                exclude=request.exclude,
                seed=request.seed,
            )
            found.append(Candidate(way, form, keep))
    return found


def _describe(subject: Subject, request: Request) -> dict[str, Any]:
    parameters = list(subject.model.parameters())
    return {
        "class": type(subject.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": request.model.dtype,
        "device": torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "cpu",
    }


def _describe_cpu() -> dict[str, str]:
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    blas = next((line for line in lines if "Math Kernel" in line or "BLAS" in line), "unknown")
    return {"blas": blas, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
