"""Count and tables of results/mixing.md, and reports for upstream, from what benchmarks/mixing.py found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from generator.markdown import table

PLACE = re.compile(r"(<!-- mixing: (\w+) -->\n).*?(<!-- end of mixing -->)", re.DOTALL)
WORDS = {"alone": "alone", "mixed": "**mixed**", "loss": "**uneven**", "refused": "refused", "unjudged": "not judged"}

CAUSES = {
    "goes on from one example": "state",
    "counts positions through": "positions",
    "mask without position_ids": "mask",
    "reads across the examples": "across",
}


def page(root: Path) -> str:
    """Return the page of the results, with its count and its tables."""
    make = {"count": _count, "ways": _ways, "decoders": _decoders}
    record = _read(root)
    text = (root / "docs" / "results" / "mixing.md").read_text(encoding="utf-8")
    assert {match[2] for match in PLACE.finditer(text)} == make.keys(), "mixing.md lost the place of a table"
    return PLACE.sub(lambda match: f"{match[1]}{make[match[2]](record)}{match[3]}", text)


def upstream(root: Path) -> str:
    """Return one short report for each model that mixes a packed row: input, expected, found."""
    record = _read(root)
    about, lengths = record["about"], record["about"]["lengths"]
    ranges = ", ".join(f"0..{length - 1}" for length in lengths)
    parts = [
        "# Models that mix packed examples: reports for upstream\n",
        f"Written by `python docs/generate.py` from `mixing.json`. torch {about['torch']}, transformers "
        f"{about['transformers']}, on a CPU with sdpa or eager attention, tiny random weights, no dropout.\n",
    ]
    for found in _mixed(record):
        what = "positions" if "position" in found["module_class"].lower() + found["module"] else "outputs"
        parts.append(
            f"## {found['model']}: examples of a packed row are mixed without a warning\n\n"
            f"- **Input.** One row of {len(lengths)} examples as `DataCollatorWithFlattening` gives it: `input_ids` "
            f"(1, {sum(lengths)}), `position_ids` {ranges}, no `attention_mask`, `use_cache=False`.\n"
            "- **Expected.** The logits of each example are those of the example alone, as in llama, or an error.\n"
            f"- **Found.** They differ by {found['difference']:.0%} (2-norm over 2-norm), and change when the tokens "
            f"of another example change. The first {what} that differ are those of `{found['module']}` "
            f"(`{found['module_class']}`): {found['cause']}.\n"
        )
    return "\n".join(parts)


def _read(root: Path) -> Any:
    return json.loads((root / "benchmarks" / "results" / "mixing.json").read_text(encoding="utf-8"))


def _mixed(record: Any) -> list[Any]:
    return [found for found in record["decoders"] if found["verdict"] == "mixed"]


def _count(record: Any) -> str:
    decoders = record["decoders"]
    judged = [found for found in decoders if found["verdict"] in ("alone", "mixed")]
    wrong = [found for found in judged if found["verdict"] != found["enumerated"]]
    silent, about = _mixed(record), record["about"]
    return (
        f"Of {len(judged)} tiny decoders of transformers {about['transformers']} that take such a row, {len(silent)} "
        f"mix its examples without a word, and {len(judged) - len(silent)} do not. An enumeration, which runs each "
        f"example alone and changes the tokens of the others, says the same for {len(judged) - len(wrong)} of "
        f"{len(judged)}: "
        f"{sum(found['verdict'] == 'mixed' for found in wrong)} false alarms, "
        f"{sum(found['verdict'] == 'alone' for found in wrong)} missed. A judgement cost at most "
        f"{max(found['cost_steps'] for found in judged):.1f} plain steps of the batch, by positions.\n"
    )


def _ways(record: Any) -> str:
    kinds, names = list(record["ways"]), list(next(iter(record["ways"].values())))
    rows = [
        [name, *(WORDS.get(record["ways"][kind][name]["verdict"], "on purpose") for kind in kinds)] for name in names
    ]
    return table(["training", *kinds], rows)


def _decoders(record: Any) -> str:
    rows = [
        [f"`{found['model']}`", f"{found['difference']:.0%}", f"`{found['module']}`", _cause(found)]
        for found in _mixed(record)
    ]
    return table(["model", "outputs differ by", "first at", "cause"], rows)


def _cause(found: Any) -> str:
    """Return one word for the sentence of a cause, which the page explains."""
    return next(word for words, word in CAUSES.items() if words in found["cause"])
