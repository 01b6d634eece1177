"""Tables of lossless beside its peers, from what benchmarks/peers.py found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from generator.markdown import head as page_head
from generator.markdown import table

WORDS = {
    "padded": "labels to the model, padded",
    "logits_to_keep": "padded, `logits_to_keep`",
    "trl, fused head": "trl's default, fused head",
    "DataCollatorWithFlattening": "`DataCollatorWithFlattening`",
    "trl, padding_free": "trl, `padding_free=True`",
    "trl, packing": "trl, `packing=True`",
    "by hand": "by hand: one row, its head at labels",
    "by hand, linear_cross_entropy": "the same, PyTorch's `linear_cross_entropy`",
    "by hand, Liger": "the same, Liger's loss on a CPU",
    "by hand, prompt cached": "by hand: each prompt once, by a cache with a graph",
    "one at a time": "one example at a time, head at labels",
    "lossless": "**`lossless`**",
    "lossless, one batch": "**`lossless`**, all in one batch",
    "lossless, one at a time": "**`lossless`**, one example at a time, `prefixes: update`",
}
OWN = tuple(name for name in WORDS if name.startswith("lossless"))
HIDDEN = "by hand, linear_cross_entropy"  # its products are not seen by PyTorch's counter
NEAR = 0.03  # of seconds: less is not told apart
SCALES = {"flops": 1e9, "bytes": 1e6, "ratio": 1.0}
SHAPES = {"wide": "four layers, a vocabulary of 32,768", "deep": "24 layers, a vocabulary of 4,096"}
UNITS = {
    "instructions": "SFT, lengths of instructions, a third prompt",
    "chats": "SFT, lengths of chats, half prompt",
    "groups": "GRPO, four answers to a prompt three times as long",
    "pairs": "DPO, pairs of answers to a prompt",
    "tree": "a tree of an agent's turns",
}
LEAST = "lossless, one at a time"
INTRO = """`lossless` beside what a user would pick instead. Every way gives the same gradient of the mean loss over all
labels of the examples, on a CPU. `python benchmarks/peers.py` measures this page anew.

*Seconds* are CPU seconds of one thread for forward and backward of an example: medians over rounds in which every way
runs once, quartiles in brackets. The machine was shared, so compare the *ratio* over the padded way in the same round.
*FLOPs* are counted. *MB* is the most that a process of its own holds over weights and gradients. *Error* is that of the
gradient against one example at a time in double precision. *Lines* are those that a user adds to the plain step.

`lossless` is measured from its second step on, since the first one compares its gradient with the plain one.
PyTorch's `linear_cross_entropy` hides its products from the counter.

**Corrections of 2026-11-28 and 2026-11-30.** At first this page said that no other way takes less memory than
`lossless`. Its numbers were three copies of the embedding's gradient, and showed no activations. Since the second
correction memory is that of a process, and models are deep or wide."""


def page(root: Path) -> str:
    """Return the page of all tables."""
    record = _read(root)
    about = record["about"]
    versions = ", ".join(f"{name} {found.partition('+')[0]}" for name, found in about["versions"].items() if found)
    parts = [
        page_head("Beside what else there is", INTRO),
        f"Llamas of width 256, untied, float32; {versions}; one thread.\n",
        "## All cases\n",
        "Time is over the padded way's. *Best* and *least* are of all ways that are not `lossless`.\n",
        table(ALL, [_summarize(name, case["ways"]) for name, case in record["cases"].items()]),
        "",
    ]
    for name, case in record["cases"].items():
        shape, _, kind = name.partition("-")
        rows = [[WORDS[way], *_cells(way, row)] for way, row in case["ways"].items()]
        loads = ", ".join(f"{load:.1f}" for load in case["load"])
        rounds = f"{len(case['ways']['padded']['seconds'])} rounds; load of the machine {loads}"
        parts += [
            f"## {name.capitalize().replace('-', ' ')}\n",
            f"{UNITS[kind][0].upper()}{UNITS[kind][1:]}. A model of {SHAPES[shape]}, "
            f"{case['parameters'] / 1e6:.0f} million parameters. {case['examples']} examples, "
            f"{case['tokens']:,} tokens, {case['labels']:,} with a label, batches of {case['batch_size']}; "
            f"{rounds}.\n",
            table(["way", "s an example", "ratio", "GFLOP", "MB", "error", "lines"], rows),
            *(f"- {line}" for line in _behind(case["ways"])),
            "",
        ]
    return "\n".join(parts)


ALL = [
    "case",
    "`lossless`: time, MB",
    "best time of others",
    "least MB of others",
    "`lossless` one at a time: time, MB",
]


def _summarize(name: str, ways: dict[str, Any]) -> list[str]:
    """Return a case in one row."""
    others = {way: row for way, row in ways.items() if way not in OWN and "refused" not in row}
    fast, small = (min(others, key=lambda way: _number(others[way], key)) for key in ("ratio", "bytes"))
    own, least = (f"{_value(ways[way], 'ratio')}, {_value(ways[way], 'bytes')}" for way in ("lossless", LEAST))
    return [
        name.replace("-", " "),
        own,
        f"{_value(others[fast], 'ratio')}, {_name_alone(fast)}",
        f"{_value(others[small], 'bytes')}, {_name_alone(small)}",
        least,
    ]


def _name_alone(way: str) -> str:
    """Return the words of a way outside of its table, where no row is above it."""
    return WORDS[way].replace("the same, ", "by hand, ")


def _read(root: Path) -> Any:
    """Return the record, without kinds of updates that are not measured to their end."""
    record = json.loads((root / "benchmarks" / "results" / "peers.json").read_text(encoding="utf-8"))
    record["cases"] = {name: case for name, case in record["cases"].items() if "ratio" in case["ways"].get(LEAST, {})}
    return record


def _number(row: dict[str, Any], key: str) -> float:
    return float(row[key]["median"] if key == "ratio" else row[key])


def _value(row: dict[str, Any], key: str) -> str:
    return {"flops": "{:.1f}", "bytes": "{:.0f}", "ratio": "{:.2f}"}[key].format(_number(row, key) / SCALES[key])


def _cells(way: str, row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return ["", "", f"not run: {row['refused']}", "", "", ""]
    seconds, ratio = (
        f"{row[key]['median']:.{digits}f} ({row[key]['low']:.{digits}f} to {row[key]['high']:.{digits}f})"
        for key, digits in (("seconds_of_example", 3), ("ratio", 2))
    )
    flops = _value(row, "flops") + (", in part hidden" if way == HIDDEN else "")
    return [seconds, ratio, flops, _value(row, "bytes"), f"{row['error']:.0e}", str(row["lines"])]


def _behind(ways: dict[str, Any]) -> list[str]:
    """Return where another way has less than `lossless`, in one line each: of time and FLOPs beside `lossless` in
    batches, of memory beside the form that holds least."""
    lines = []
    kinds = (
        ("ratio", "lossless", "time", "less"),
        ("flops", "lossless", "FLOPs", "fewer"),
        ("bytes", LEAST, "MB", "fewer"),
    )
    for key, own, unit, fewer in kinds:
        less = [
            f"{WORDS[way]} takes {share:.2f} of its {unit}"
            for way, row in ways.items()
            if way not in OWN and key in row and not (key == "flops" and way == HIDDEN)
            if (share := _number(row, key) / _number(ways[own], key)) < 1 - NEAR
        ]
        lines.append(f"{WORDS[own]}: {'; '.join(less) or f'no other way takes {fewer} {unit}, beyond 3 %'}.")
    return lines
