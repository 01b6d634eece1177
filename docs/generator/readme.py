"""The measured numbers in README and quickstart page: parts of a recorded comparison between two comments.

`make picture` records it: `docs/picture/quickstart.md` is the output of `sparsebp compare -o md`, never edited.
"""

from __future__ import annotations

import re
from pathlib import Path

RECORDED = "docs/picture/quickstart.md"
PLACE = re.compile(r"(<!-- numbers: quickstart -->\n).*?(<!-- end of numbers -->)", re.DOTALL)
WORDS = ("In words",)
# The verdict of a recorded comparison has one sentence with every number; a first reader gets one line for each.
VERDICT = re.compile(
    r"- \*\*(?P<dense>[\w-]+)\*\*: baseline\.\n- \*\*(?P<name>[\w-]+)\*\*: exact: what differs is rounding "
    r"\((?P<loss>\S+) in eval/loss\); step time (?P<step>\S+ %) in these runs; timed in turns with dense, forward and "
    r"backward take (?P<passes>\S+ %) \[(?P<low>\S+), (?P<high>\S+)\] \(median and quartiles of (?P<probes>\d+) "
    r"probes\), (?P<reached>\d+)% of the possible saving; memory held by a step (?P<memory>\S+ %) in these runs\."
)
LINES = """With `{name}`, relative to `{dense}`:

- evaluation loss: equal up to rounding (difference {loss})
- time of a training step: {step}
- time of forward plus backward: {passes} (median of {probes} measurements; quartiles {low} and {high} %). Each
  measurement runs one batch with and without `lossless` by turns. The time fell less than the FLOPs: for every 10 %
  of FLOPs saved, forward plus backward took about {ratio:g} % less time.
- peak memory of tensors during a step: {memory}"""


def page(root: Path, name: str = "README.md", shown: tuple[str, ...] = WORDS) -> str:
    """Return a page with those parts of the recorded numbers, or unchanged if nothing was recorded."""
    text = (root / name).read_text(encoding="utf-8")
    assert PLACE.search(text), f"{name} has lost the place of its numbers"
    recorded = root / RECORDED
    if not recorded.exists():
        return text
    parts = [part.partition("\n") for part in recorded.read_text(encoding="utf-8").split("### ")[1:]]
    found = [(title, body.strip()) for title, _, body in parts if title.startswith(shown)]
    found = [(title, VERDICT.sub(_write_lines, body)) for title, body in found]
    headed = [body if len(found) == 1 else f"**{title}**\n\n{body}" for title, body in found]
    body = "\n\n".join(headed)
    return PLACE.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text)


def _write_lines(match: re.Match[str]) -> str:
    return LINES.format_map(match.groupdict() | {"ratio": int(match["reached"]) / 10})


def quickstart(root: Path) -> str:
    """Return the page of the quickstart with the recorded numbers."""
    return page(root, "docs/guide/quickstart.md")
