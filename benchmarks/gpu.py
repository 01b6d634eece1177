"""Measures `lossless` and then every form on a GPU from a bare checkout: correctness, then waiting, then times.

    python benchmarks/gpu.py                        # twelve minutes at most; writes benchmarks/results/gpu*.json
    python benchmarks/gpu.py --headline --minutes 9 # whole updates by `lossless` alone; again: goes on from there
    python benchmarks/gpu.py --device cpu --tiny    # the same code on a CPU, in seconds; it measures nothing
    python benchmarks/gpu.py --fake                 # without a GPU: counts, and times of a model

Exit code 1: a form is wrong, or waits for the device where plain PyTorch does not. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkout import use_checkout

NEEDED = ("torch", "transformers", "pydantic", "yaml")
SECONDS_AFTER = 5.0  # for the summary
# The share of the time at which each part ends at the latest; whole steps are measured until the end.
PARTS = {"headline": 0.5, "checks": 0.62, "waits": 0.67, "counts": 0.75, "forms": 0.82, "linears": 0.87}


def main() -> int:
    """Run everything; return the exit code."""
    begin = time.monotonic()
    args = _read_arguments()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"error: not installed here: {', '.join(missing)}", file=sys.stderr)
        return 2
    if args.fake:
        from fake_gpu import guard

        guard.load()  # before torch
    use_checkout()
    # use_checkout() must run before these imports.
    if args.fake:
        import modelled

        args.out = args.out or Path(__file__).parent / "results" / "gpu-modelled.json"
        return modelled.main(args)
    import correct
    import headline
    import measured
    import steps
    import torch
    from waiting import watch

    from sparsebp_cli.errors import UsageError
    from sparsebp_tools.bench.row import make_row, run_interleaved
    from sparsebp_tools.bench.variant import Variant

    try:
        measured.choose(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    device, deadline = torch.device(args.device), begin + 60 * args.minutes - SECONDS_AFTER
    ends = {part: begin + share * (deadline - begin) for part, share in PARTS.items()}
    facts = measured.describe(device)
    print(f"{facts['device']}, torch {facts['versions']['torch']}, transformers {facts['versions']['transformers']}")
    print(f"float32 products in TF32: {'yes' if facts.get('tf32') else 'no'}; Triton's kernels: {facts['triton_runs']}")
    wrong = _measure_updates(headline.Headline, args, facts, deadline if args.headline else ends["headline"])
    if args.headline:
        return 1 if wrong else 0
    checks, short = [], []
    for check in correct.check_all(device):
        if time.monotonic() > ends["checks"]:
            short.append(f"checks ended after {len(checks)}: no time was left for more")
            break
        checks.append(check)
        if not check.good:
            print(f"WRONG  {check.kind}: {check.form}, {check.dtype}: {check.error:.2e} {check.note}", flush=True)
    num_wrong = sum(not check.good for check in checks)
    print(f"{len(checks) - num_wrong} of {len(checks)} checks are right ({time.monotonic() - begin:.0f} s)", flush=True)
    small = correct.make_subject(device, torch.bfloat16)
    waits_of_small = [watch(small, Variant("plain PyTorch"))]
    for label, variant in correct.list_variants():
        if time.monotonic() > ends["waits"]:
            short.append(f"waits were counted in {len(waits_of_small)} small steps: no time was left for more")
            break
        waits_of_small.append(watch(small, replace(variant, label=label)))
    subject, args.batch = measured.make_subject(device, args)
    entries, notes = measured.count_all(subject, measured.list_cases(args), ends["counts"])
    notes += short
    waits = [watch(entry.subject, entry.variant) for entry in entries]
    print(f"counted {len(entries)} variants ({time.monotonic() - begin:.0f} s)", flush=True)
    variants = [(entry.subject, entry.variant) for entry in entries]
    passes = run_interleaved(variants, rounds=args.rounds, warmup=args.warmup, deadline=ends["forms"])
    rows = [
        make_row(entry.case, entry.count, found, entries[0].count, passes[0])
        for entry, found in zip(entries, passes, strict=True)
    ]
    layers = steps.LAYERS if args.size == "1b" else {"tiny": [("q", 1, 64, 32)]}
    swept = steps.sweep(device, args.batch * args.length, layers, ends["linears"])
    ways = steps.list_ways()[:: 1 if args.size == "1b" else 6]
    found = steps.measure(subject.model, subject.batch, ways, deadline, args.rounds)
    late = measured.find_late(waits_of_small) + measured.find_late(waits)
    result = {
        "format": 1,
        "command": " ".join(["python benchmarks/gpu.py", *_show_arguments(args)]),
        "machine": facts,
        "model": {"parameters": sum(p.numel() for p in subject.model.parameters())} | measured.SIZES[args.size],
        "options": {key: value for key, value in vars(args).items() if key not in ("out", "headline")},
        "rounds": len(passes[0]),
        "seconds": round(time.monotonic() - begin, 1),
        "notes": notes,
        "checks": [asdict(check) for check in checks],
        "waits": [asdict(wait) for wait in waits],
        "waits_of_small": [asdict(wait) for wait in waits_of_small],
        "rows": [row.model_dump(mode="json") for row in rows],
        "linears": [asdict(row) for row in swept],
        "steps": [one.as_row(found[0]) for one in found],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    measured.print_table(rows, waits, len(passes[0]))
    steps.print_sweep(swept)
    steps.print_steps([one.as_row(found[0]) for one in found])
    for text in [*notes, *late]:
        print(text)
    print(f"{time.monotonic() - begin:.0f} s; JSON: {args.out.name}")
    return 1 if wrong or num_wrong or late else 0


def _measure_updates(make: Any, args: argparse.Namespace, facts: dict[str, Any], deadline: float) -> list[str]:
    """Measure whole updates, first of a tiny model in float32 for their gradients; return what is wrong."""
    import torch

    device, wrong = torch.device(args.device), list[str]()
    for size in dict.fromkeys(("tiny", args.size)):
        out = args.out.with_name(args.out.stem + ("-headline" if size == args.size else "-exact") + ".json")
        found = make(out, facts, {"size": size})
        found.measure_all(size, device, args.rounds if size == args.size else 1, deadline)
        wrong += found.find_wrong()
    found.print_table()
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return wrong


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda")
    parser.add_argument("--fake", action="store_true", help="count on a device that does nothing; model the times")
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny", default="1b", help="a tiny model")
    parser.add_argument("--headline", action="store_true", help="whole updates by `lossless` and its rivals alone")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batch", type=int, default=4, help="halved until a dense step fits")
    parser.add_argument("--length", type=int, help="default: 2048, or 32 with --tiny")
    parser.add_argument("--rounds", type=int, help="at most; default: 20, or 1 with --tiny")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="of all parts together; default: 12, or 60 with --tiny")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu.json")
    return parser.parse_args()


def _show_arguments(args: argparse.Namespace) -> list[str]:
    shown = [f"--{key} {value}" for key, value in vars(args).items() if key not in ("out", "size", "headline")]
    return [*shown, *(["--tiny"] if args.size == "tiny" else [])]


if __name__ == "__main__":
    sys.exit(main())
