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
    "lossless, logits whole": "**`lossless`**, `logits: whole`",
    "lossless, one batch": "**`lossless`**, all in one batch",
}
OWN = tuple(name for name in WORDS if name.startswith("lossless"))
HIDDEN = "by hand, linear_cross_entropy"  # its products are not seen by PyTorch's counter
NEAR = 0.03  # of seconds: less is not told apart
SCALES = {"flops": 1e9, "bytes": 1e6, "ratio": 1.0}
UNITS = {
    "instructions": "SFT, lengths of instructions, a third prompt",
    "chat": "SFT, lengths of chats, half prompt",
    "groups": "GRPO, answers to a prompt four times as long",
    "pairs": "DPO, pairs of answers to a prompt",
    "agent": "a tree of an agent's turns",
}
INTRO = """`lossless` beside what a user would pick instead. Every way gives the same gradient of the mean loss over all
labels of the examples, on a CPU. `python benchmarks/peers.py` measures this page anew.

*Seconds* are CPU seconds of one thread for forward and backward of an example: medians over rounds in which every way
runs once, quartiles in brackets. The machine was shared, so compare the *ratio* over the padded way in the same round.
*FLOPs* and *MB* are counts; MB are the most bytes alive over weights and gradients. *Error* is that of the gradient
against one example at a time in double precision. *Lines* are those that a user adds to the plain step.

`lossless` is measured from its second step on, since the first one compares its gradient with the plain one. Its logits
are in tiles unless the row says otherwise. PyTorch's `linear_cross_entropy` hides its products from the counter.

**Correction of 2026-11-28.** The column *MB* does not show what a batch holds: in this model the peak of most rows
is three copies of the embedding's gradient (151 MB), where no activation is left. In deep models `lossless` holds
more than others do, since all rows of a batch are alive at once. With 24 layers of width 256 its process held 1.5 to
2.2 times what the least of the others held (520 and 332 MB, 764 and 512, 634 and 287), in 0.35 to 0.43 of the padded
time where the best of the others took 0.44 to 0.47."""


def page(root: Path) -> str:
    """Return the page of all tables."""
    record = _read(root)
    about = record["about"]
    versions = ", ".join(f"{name} {found.partition('+')[0]}" for name, found in about["versions"].items() if found)
    parts = [
        page_head("Beside what else there is", INTRO),
        f"A llama of {about['parameters'] / 1e6:.0f} million parameters, vocabulary {about['model']['vocab_size']:,}, "
        f"float32; {versions}; one thread.\n",
    ]
    for name, case in record["cases"].items():
        is_timed = "ratio" in case["ways"]["lossless"]
        shown = slice(0 if is_timed else 2, None)
        rows = [[WORDS[way], *_cells(way, row)[shown]] for way, row in case["ways"].items()]
        loads = ", ".join(f"{load:.1f}" for load in case["load"])
        rounds = f"{len(case['ways']['padded']['seconds'])} rounds; load of the machine {loads}"
        parts += [
            f"## {UNITS[name][0].upper()}{UNITS[name][1:]}\n",
            f"{case['examples']} examples, {case['tokens']:,} tokens, {case['labels']:,} with a label, batches of "
            f"{case['batch_size']}; {rounds if is_timed else 'not timed'}.\n",
            table(["way", *["s an example", "ratio", "GFLOP", "MB", "error", "lines"][shown]], rows),
            *(f"- {line}" for line in _behind(case["ways"])),
            "",
        ]
    return "\n".join(parts)


def _read(root: Path) -> Any:
    """Return the record, without kinds of updates that are not counted to their end."""
    record = json.loads((root / "benchmarks" / "results" / "peers.json").read_text(encoding="utf-8"))
    record["cases"] = {name: case for name, case in record["cases"].items() if case["ways"].keys() == WORDS.keys()}
    return record


def _number(row: dict[str, Any], key: str) -> float:
    return float(row[key]["median"] if key == "ratio" else row[key])


def _value(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    return {"flops": "{:.1f}", "bytes": "{:.0f}", "ratio": "{:.2f}"}[key].format(_number(row, key) / SCALES[key])


def _cells(way: str, row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return ["", "", f"not run: {row['refused']}", "", "", ""]
    seconds, ratio = (
        f"{row[key]['median']:.{digits}f} ({row[key]['low']:.{digits}f} to {row[key]['high']:.{digits}f})"
        if key in row
        else "not timed"
        for key, digits in (("seconds_of_example", 3), ("ratio", 2))
    )
    flops = _value(row, "flops") + (", in part hidden" if way == HIDDEN else "")
    return [seconds, ratio, flops, _value(row, "bytes"), f"{row['error']:.0e}", str(row["lines"])]


def _behind(ways: dict[str, Any]) -> list[str]:
    """Return where another way has less than `lossless`, in one line each."""
    lines = []
    for key, words in (("ratio", "of the time"), ("flops", "of the FLOPs")):
        if key not in ways["lossless"]:
            continue
        own = _number(ways["lossless"], key)
        for way, row in ways.items():
            if way in OWN or key not in row or (key == "flops" and way == HIDDEN):
                continue
            if (share := _number(row, key) / own) < 1 - NEAR:
                lines.append(f"Behind: {WORDS[way]} takes {share:.2f} {words} of `lossless`.")
    than = "less time or fewer FLOPs" if "ratio" in ways["lossless"] else "fewer FLOPs"
    return lines or [f"No other way takes {than} than `lossless`, beyond 3 %."]
