"""Show a benchmark as tables of at most 100 columns."""

from __future__ import annotations

from sparsebp_cli.cli.quantity import show_count, show_seconds
from sparsebp_cli.cli.screen import console, make_table, print_line
from sparsebp_tools.bench import Benchmark, BenchmarkRow

NUMBERS = ("kept", "speed-up", "quartiles", "limit", "reached", "flops", "saved", "peak")
LEGEND = (
    "speed-up: of forward + backward over plain PyTorch; quartiles over rounds, which time each row once",
    "limit, reached: largest speed-up that the remaining FLOPs allow, and the fraction of it reached",
    "flops, saved, peak: FLOPs of the backward, memory saved for it and peak memory, over plain PyTorch's",
    "worth: at the cost of one kept row or entry, dense with a smaller batch computes this many",
    "choosing by norm can pay only if the effective sample size of the gradients, as a fraction, is",
    "below 1 / worth; `sparsebp validate --probe RECIPE` measures it (the tokens of bench are random)",
)


def print_benchmark(found: Benchmark) -> None:
    """Print the machine, the table, and the break-even of each form."""
    request, model, machine = found.request, found.model, found.machine
    name = request.model.name or f"random {(request.model.config or {}).get('model_type', '')}"
    device = (
        model["device"]
        if model["device"] != "cpu"
        else f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    )
    plain = found.rows[0]
    print_line(
        f"{request.policy} on {name}: {show_count(model['parameters'])} parameters, {model['dtype']}, "
        f"{request.batch} x {request.length} tokens"
    )
    print_line(f"{device}; torch {machine['packages']['torch']}; load {machine['load_average'][0]:g} at the start")
    print_line(
        f"plain PyTorch: {show_seconds(plain.seconds.median)} forward + backward, median of {request.rounds} rounds"
    )
    table, above = make_table("form", *NUMBERS, numbers=NUMBERS), None
    for row in found.rows:
        group = (row.site, row.label) if row.execution != "dense" else ("", "")
        if above is not None and group[0] != above[0]:
            table.add_section()
            table.add_row(f"at {row.site}", style="bold")
        elif above is not None and group != above and row.keep is not None:
            table.add_section()
        table.add_row(*_cells(row))
        above = group
    console().print(table)
    for text in dict.fromkeys(f"{row.site} {row.label}: {row.note}" for row in found.rows if row.note):
        print_line(f"note: {text}")
    if found.break_evens:
        table = make_table("site", "form", "is faster than", "if this fraction is kept")
        for one in found.break_evens:
            table.add_row(one.site, one.label, one.against, one.words)
        console().print(table)
    worths: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        if row.unit_worth is not None:
            share = row.kept_share if row.keep is None else row.keep
            worths.setdefault((row.site, row.label), []).append(f"{row.unit_worth:.3g} at {share:.3g}")
    if worths:
        table = make_table("site", "form", "worth of a kept row or entry, at each fraction")
        for (site, label), notes in worths.items():
            table.add_row(site, label, ", ".join(notes))
        console().print(table)
    for line in LEGEND:
        print_line(line)


def _cells(row: BenchmarkRow) -> list[str]:
    ratio = row.ratio
    return [
        f"{row.label}, {row.site}" if row.execution == "dense" and row.site else row.label,
        "" if row.keep is None else f"{row.keep:g}",
        f"{row.speedup:.2f}x",
        f"{1 / ratio.high:.2f}-{1 / ratio.low:.2f}",
        "" if row.ceiling is None else f"{row.ceiling:.2f}x",
        "" if row.realised_share is None else f"{row.realised_share:.0%}",
        f"{row.flops_ratio:.2f}",
        f"{row.saved_ratio:.2f}",
        "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}",
    ]
