"""The page of architectures: which models each kind of policy goes with, as the tests found it."""

from __future__ import annotations

import json
from pathlib import Path

from generator.markdown import code, head, table

FOUND = Path("docs/reference/architectures.json")
NO_LAYOUT = "token selection does not support the layer "
WAY_OUT = ": train it without"  # how a sentence goes on that is the same for all
PLUGIN = "use another policy, or"  # how the reason starts where none is known
TEXT = """\
Tiny models of transformers {version}, each trained for a step with and without a policy. A tick: the gradient is
the same, up to rounding (`lossless`), or that of the reference engine (`tokens` in all modes; a plugin can add the
[layout](../guide/tokens.md#add-an-architecture) of a layer). Else the reason why the engine refuses the model, when a
policy is attached or at the first batch. Every other policy works at the linears of any model. Models that cannot be
made tiny from their configuration alone are not here: they were not tried."""


def page(root: Path) -> str:
    """Return docs/reference/architectures.md."""
    found = json.loads((root / FOUND).read_text(encoding="utf-8"))
    lossless, tokens = found["lossless"], found["tokens"]
    names = sorted(lossless.keys() | tokens.keys(), key=str.lower)
    counts = f"{_count(lossless)} of {len(lossless)} with `lossless`, {_count(tokens)} of {len(tokens)} with `tokens`"
    parts = [
        head("Architectures", TEXT.format(version=found["transformers"])),
        f"## Decoders\n\n{counts}.\n",
        table(
            ("model", "`lossless`", "`tokens`"),
            [(code(name), _cell(lossless.get(name)), _cell(tokens.get(name))) for name in names],
        ),
    ]
    for title, column in (
        ("Encoders and decoders", "lossless, encoder and decoder"),
        ("Classification", "lossless, classification"),
    ):
        known = found[column]
        parts += [
            f"## {title}\n\n{_count(known)} of {len(known)} with `lossless`.\n",
            table(("model", "`lossless`"), [(code(name), _cell(text)) for name, text in known.items()]),
        ]
    return "\n".join(parts)


def _count(column: dict[str, str]) -> int:
    return list(column.values()).count("")


def _cell(text: str | None) -> str:
    if text is None:
        return "not tried"
    if not text.startswith(NO_LAYOUT):
        return text.partition(WAY_OUT)[0] or "✓"
    reason = text.removeprefix(NO_LAYOUT).partition(": ")[2]
    return "no layout" if reason.startswith(PLUGIN) else f"no layout: {reason}"
