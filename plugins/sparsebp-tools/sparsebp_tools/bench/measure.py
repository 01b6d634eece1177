"""Measure a benchmark request: build the model, time all variants in interleaved rounds, count, and summarise."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.backward.linear.quantized import count_parameters
from sparsebp_cli.errors import DataError
from sparsebp_cli.worker.compiled import BACKEND
from sparsebp_cli.worker.environment import describe_environment
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_tools.bench import Benchmark, Request
from sparsebp_tools.bench.row import BenchCase, break_evens, make_row, run_interleaved
from sparsebp_tools.bench.subject import Count, Subject
from sparsebp_tools.bench.variant import CSR_ALWAYS, CSR_NEVER, Variant

COUNT_PASSES = 3  # duration of counting a variant, in timed passes: for the progress display
CLASSES = 2  # of a classification head; so few cost nothing measurable


def measure(request: Request, report: Callable[[str, int, int], None]) -> Benchmark:
    """Measure every form of a request. ``report`` gets the current activity and the numbers of finished and total
    passes."""
    load = [round(value, 2) for value in psutil.getloadavg()]  # before this process adds to it
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    cases = list_cases(request)
    variants = [case.variant for case in cases]
    total, done = len(variants) * (COUNT_PASSES + request.warmup + request.rounds), 0
    report("loading the model", done, total)
    subject = build_subject(request)

    def on_pass(what: str) -> None:
        nonlocal done
        report(what, done, total)
        done += 1

    # A separate model, because preparing a shared one for the next variant would compile it again each time.
    compiled = build_subject(request) if request.compile else subject
    counts: list[Count] = []
    for variant in variants:
        on_pass(f"counting: {variant.label}")
        is_compiled = variant.compiler is not None  # the first case, plain PyTorch, has its counts
        counts.append(compiled.count_memory(variant, counts[0]) if is_compiled else subject.count(variant))
        done += COUNT_PASSES - 1
    found = run_interleaved(
        [(subject if variant.compiler is None else compiled, variant) for variant in variants],
        rounds=request.rounds,
        warmup=request.warmup,
        on_pass=on_pass,
    )
    report("summing up", total, total)
    rows = [
        make_row(case, count, passes, counts[0], found[0])
        for case, count, passes in zip(cases, counts, found, strict=True)
    ]
    return Benchmark(
        request=request,
        model=_describe(subject, request),
        machine=describe_environment() | {"threads": torch.get_num_threads(), "load_average": load} | _describe_cpu(),
        rows=rows,
        break_evens=break_evens(request.forms, rows),
    )


def build_subject(request: Request) -> Subject:
    """Build the model and a batch of random tokens on their device; the tokens do not affect times."""
    disable_progress_bar()
    if request.device == "cuda" and not torch.cuda.is_available():
        raise DataError("target.device is cuda, but torch finds no CUDA device here; use auto or cpu")
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


def list_cases(request: Request) -> list[BenchCase]:
    """Return plain PyTorch, the other variants that keep all gradients, then every form at every fraction."""
    sites = list(dict.fromkeys(form.site for form in request.forms))
    found = [BenchCase(Variant("plain PyTorch"))]
    if request.compile:
        found.append(BenchCase(Variant("plain PyTorch, compiled", compiler=BACKEND)))
    found += [BenchCase(Variant("dense, engine", site, exclude=request.exclude)) for site in sites]
    for form in request.forms:
        for keep in form.keeps:
            variant = Variant(
                f"{form.site}, {form.label}" + ("" if keep is None else f" at {keep:g}"),
                form.site,
                form.make(request.policy, keep),
                csr_below={"csr": CSR_ALWAYS, "masked": CSR_NEVER}.get(form.execution),
                exclude=request.exclude,
                seed=request.seed,
            )
            found.append(BenchCase(variant, form, keep))
    return found


def _describe(subject: Subject, request: Request) -> dict[str, object]:
    parameters = list(subject.model.parameters())
    return {
        "class": type(subject.model).__name__,
        "parameters": count_parameters(subject.model),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": request.model.dtype,
        "device": torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "cpu",
    }


def _describe_cpu() -> dict[str, str]:
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    blas = next((line for line in lines if "Math Kernel" in line or "BLAS" in line), "unknown")
    return {"blas": blas, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
