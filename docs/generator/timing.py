"""Tables of recorded measurements in pages of the results, from what benchmarks write to benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generator.markdown import head as page_head
from generator.markdown import table

PLACE = re.compile(r"(<!-- timing: (\w+) -->\n).*?(<!-- end of timing -->)", re.DOTALL)
PLAIN = {"rows": "head of labelled rows", "padding-free": "without padding", "padded": "padded"}


def measurements(root: Path) -> str:
    """Return the page of measurements of single methods with its recorded tables."""
    text = (root / "docs" / "results" / "measurements.md").read_text(encoding="utf-8")
    found = {match[2] for match in PLACE.finditer(text)}
    assert found == TABLES.keys(), f"measurements.md lost the place of a table: {found ^ TABLES.keys()}"

    def fill(match: re.Match[str]) -> str:
        file = root / "benchmarks" / "results" / f"{FILES.get(match[2], f'{match[2]}-cpu')}.json"
        return f"{match[1]}{TABLES[match[2]](json.loads(file.read_text(encoding='utf-8')))}{match[3]}"

    return PLACE.sub(fill, text)


def _lossless(record: Any) -> str:
    rows = []
    for name, ways in record["cases"].items():
        by_way = {way["way"]: way for way in ways}
        own, padded = by_way.pop("lossless"), by_way["padded"]
        best = max(by_way.values(), key=lambda way: float(way["speedup"]))
        rows.append(
            [
                name,
                f"{own['speedup']:.2f}x ({own['ratio']['low']:.2f} to {own['ratio']['high']:.2f} of the time)",
                f"{own['flops_share']:.0%}",
                f"{own['peak_bytes'] / padded['peak_bytes']:.0%}",
                f"{best['speedup']:.2f}x ({PLAIN[best['way']]})",
            ]
        )
    about = record["about"]
    head = (
        f"A llama of {about['parameters'] / 1e6:.0f}M parameters, float32, {about['threads']} CPU cores, torch "
        f"{about['torch'].partition('+')[0]}, transformers {about['transformers']}. Medians over rounds in which every "
        "way runs once, over the padded step of the same round; quartiles in brackets.\n\n"
    )
    return head + table(["batch", "lossless", "FLOPs", "peak of memory", "best plain form"], rows)


def _exactness(record: Any) -> str:
    """Return how many comparisons each axis of the draw had, by value and by pairs of values."""
    names, total = ("right", "plain", "refused", "wrong"), record["total"]
    rows = []
    for axis, values in record["axes"].items():
        count = [sum(found[place] for found in values.values()) for place in range(len(names))]
        tried = {value: found for value, found in values.items() if sum(found)}
        least = min(tried, key=lambda value: tried[value][0] / sum(tried[value]))
        share = f"{tried[least][0] / sum(tried[least]):.0%} of {sum(tried[least]):,} with {least}"
        rows.append([axis, f"{len(tried)} of {len(values)}", f"{count[0] / sum(count):.0%}", share, str(count[3])])
    pairs = record["pairs"].values()
    met, possible = (sum(pair[place] for pair in pairs) for place in (1, 0))
    about = record["about"]
    head = (
        f"{record['comparisons']:,} updates were compared on {record['date']} at commit `{record['commit']}` (torch "
        f"{about['torch'].partition('+')[0]}, transformers {about['transformers']}, peft {about['peft']}, trl "
        f"{about['trl']}): {total['right']:,} packed and right, {total['plain']:,} run plainly, {total['refused']:,} "
        f"refused by name, {total['wrong']:,} wrong. Of {possible:,} pairs of values {met:,} met."
    )
    head += f" {record['note']}" if "note" in record else ""
    return f"{head}\n\n" + table(["axis", "values drawn", "packed and right", "smallest share", "wrong"], rows)


def _waste(record: Any) -> str:
    rows = [
        [
            name,
            f"{row['plain'] / 1e6:,.0f}",
            f"{row['lossless'] / 1e6:,.0f}",
            f"{row['lossless'] / row['plain']:.2f}",
            f"{row['error']:.0e}" if "error" in row else "",
        ]
        for name, row in record["cases"].items()
    ]
    return table(["update", "plain, MFLOP", "lossless, MFLOP", "share", "error of the gradient"], rows)


def _updates(record: Any) -> str:
    ways = {"plain": "plain", "batch": "`prefixes: share`", "update": "`prefixes: update`"}
    rows = []
    for order, found in record["cases"].items():
        plain = found["plain"]
        for way, name in ways.items():
            row = found[way]
            shares = (f"{row['flops'] / plain['flops']:.2f}", f"{row['bytes'] / plain['bytes']:.2f}")
            rows.append([order, name, f"{row['flops'] / 1e6:,.0f}", shares[0], shares[1], f"{row['error']:.0e}"])
    return table(["answers", "way", "MFLOP", "share", "share of the bytes held", "error of the gradient"], rows)


def _policy_updates(record: Any) -> str:
    rows = []
    for name, found in record["cases"].items():
        plain = found["plain"]["flops"]
        rows.append(
            [name, f"{plain / 1e6:,.0f}", *(f"{found[way]['flops'] / plain:.2f}" for way in ("share", "update"))]
        )
    return table(["update", "plain, MFLOP", "`prefixes: share`", "`prefixes: update`"], rows)


def _labels(record: Any) -> str:
    ways = ("by hand", "tokens", "lossless", "both")
    rows = [
        [name, *(f"{row[way] / row['plain']:.2f}" for way in ways), f"{row['error']:.0e}"]
        for name, row in record["cases"].items()
    ]
    names = ["batch", "by hand", "`tokens`, `exact`", "`lossless`", "both", "error of the gradient"]
    return table(names, rows)


def _head(record: Any) -> str:
    ways = {
        "plain": "padded",
        "by hand": "by hand",
        "torch": "`linear_cross_entropy`",
        "whole": "`logits: whole`",
        "tiles": "`logits: tiles`",
    }
    rows = []
    for name, found in record["cases"].items():
        worst = max(float(found[way]["error"]) for way in ("whole", "tiles"))
        rows.append([name, *(f"{found[way]['bytes'] / 1e6:.0f}" for way in ways), f"{worst:.0e}"])
    return table(["step", *ways.values(), "error of the gradient"], rows)


def _dropbp(record: Any) -> str:
    rows = [
        [
            f"`{name}`",
            *(
                f"{way[key]['median']:.2f}x ({way[key]['low']:.2f} to {way[key]['high']:.2f})"
                for key in ("step_speedup", "backward_speedup")
            ),
            f"{way['flops_share']:.0%}",
            f"{way['saved_share']:.0%}",
        ]
        for name, way in record["ways"].items()
        if name != "dense"
    ]
    versions = record["versions"]
    head = (
        f"A llama of {record['model']['num_parameters'] / 1e6:.0f}M parameters, {record['batch'][0]} x "
        f"{record['batch'][1]} tokens, float32, AdamW, {record['threads']} CPU threads, "
        f"torch {versions['torch'].partition('+')[0]}, {record['rounds']} rounds in which every way runs once; "
        "medians over dense in the same round, quartiles in brackets.\n\n"
    )
    return head + table(["way", "whole step", "backward", "FLOPs", "bytes kept"], rows)


def _tokens(record: Any) -> str:
    """Return the rows of the llama; the file has a phi, too."""
    ways: dict[tuple[int, str], dict[str, Any]] = {}
    for row in record["rows"]:
        if row["family"] == "llama":
            ways.setdefault((row["keep"], row["layout"]), {})[row["way"]] = row
    length, rows = record["facts"]["length"], []
    for (keep, layout), way in ways.items():
        exact, detach, dense = way["exact"], way["detach"], way["dense"]
        speeds = (f"{row[key]:.2f}x" for row in (exact, detach) for key in ("speedup", "ceiling"))
        saved = f"{detach['saved_bytes'] / dense['saved_bytes']:.0%}"
        mask = f"{way['loss mask']['speedup']:.2f}x"
        rows.append([f"{keep} of {length}", layout, mask, *speeds, f"{detach['realised']:.0%}", saved])
    return table(
        ["trained", "where", "loss mask", "exact", "its limit", "detach", "its limit", "reached", "saved bytes"], rows
    )


def _gpu_forms(record: Any) -> str:
    ways = ("CPU's forms", "no Triton", "Triton, fast", "Triton, slow")
    rows = [
        [form["model"], form["form"], f"{form['ideal']:.2f}", *(f"{form[way]['ratio']:.2f}" for way in ways)]
        for form in record["forms"]
    ]
    return table(["model", "form", "ideal", *ways], rows)


def _gpu_steps(record: Any) -> str:
    steps = [step for step in record["steps"] if "milliseconds" in step and not step["label"].endswith(", engine")]
    rows = [
        [
            step["label"],
            f"{step['milliseconds']:.1f}",
            f"{steps[0]['milliseconds'] / step['milliseconds']:.2f}x",
            f"{step['operations']:,}",
            f"{step['gigabytes']:.0f}",
            f"{step['teraflops']:.1f}",
        ]
        for step in steps
    ]
    return table(["step", "ms, modelled", "speed-up, modelled", "operations", "GB", "TFLOP"], rows)


TABLES: dict[str, Callable[[Any], str]] = {
    "lossless": _lossless,
    "exactness": _exactness,
    "updates": _updates,
    "policy_updates": _policy_updates,
    "waste": _waste,
    "head": _head,
    "labels": _labels,
    "dropbp": _dropbp,
    "tokens": _tokens,
    "gpu_forms": _gpu_forms,
    "gpu_steps": _gpu_steps,
}
FILES = {"exactness": "exactness", "gpu_forms": "gpu-modelled", "gpu_steps": "gpu-modelled"}  # else by the table's name

POLICIES = """Whole training steps of every policy that changes a step, beside dense ones: forward, backward and AdamW.
Written from `benchmarks/results/policies-cpu.json`, which `python benchmarks/policies.py` measures anew,
in some ten minutes on two quiet cores.

*Step* and *backward* are how many times as fast, medians over the rounds with quartiles; in each round every way runs
once, in another order, and a ratio is of one round. *FLOPs* are those of forward and backward in one step without a
clock, over dense; *ceiling* is one over them, and *realised* the share of the time they would save that whole steps
save. More than 100 % is the optimizer, which leaves alone what has no gradient. *Kept* are the bytes kept for the
backward, over dense.

Every token of the batch is trained and every text has full length, so `lossless` has nothing to leave out: its row is
what attaching costs, and `tokens` with `mode: exact` gains only behind the last attention. Policies that decide late
(`grades`, `vcas`) are in their first steps, which are dense."""
VARIES = ("layerdrop", "dropbp")  # another number of blocks, or others, at each step


def policies_page(root: Path) -> str:
    """Return the page of step times of all policies."""
    found = json.loads((root / "benchmarks/results/policies-cpu.json").read_text(encoding="utf-8"))
    versions, model, batch = found["versions"], found["model"], found["batch"]
    setting = (
        f"A llama of {model['num_parameters'] / 1e6:.0f} million parameters, {model['num_hidden_layers']} layers, "
        f"random weights, {batch[0]} texts of {batch[1]} tokens, AdamW, float32; {found['threads']} cores "
        f"({found['machine']}, load {found['load_before']:.1f} before), torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {found['rounds']} rounds. A dense step takes "
        f"{found['ways']['dense']['step_seconds']['median']:.2f} s."
    )
    rows = [_way(name, row) for name, row in found["ways"].items() if name != "dense"]
    columns = ("policy", "step", "backward", "FLOPs", "ceiling", "realised", "kept")
    note = (
        "Of policies that leave out other blocks at each step, FLOPs and ceiling are those of one step and times of "
        "others; what is realised is not told.\n"
    )
    return "\n".join([page_head("Step times of all policies", POLICIES), f"{setting}\n", table(columns, rows), note])


def _way(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    speeds = (row[key] for key in ("step_speedup", "backward_speedup"))
    step, backward = (f"{speed['median']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f})" for speed in speeds)
    is_told = row["realised"] is not None and not name.startswith(VARIES)
    realised = f"{row['realised']:.0%}" if is_told else ""
    shares = f"{row['flops_share']:.0%}", f"{row['ceiling']:.2f}x"
    return name, step, backward, *shares, realised, f"{row['saved_share']:.0%}"
