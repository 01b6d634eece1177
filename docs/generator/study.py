"""Writes a table of each report in docs/results into their page, and checks the page's claims.

A sentence of the page that compares carries a claim: ``<!-- claim: REPORT GROUP[,GROUP] "words of the verdict" -->``,
or ``... not "words" -->``. The verdict of each group must contain these words, or must not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from generator.markdown import table

PAGE = "docs/results/studies.md"
PLACE = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end of report -->)", re.DOTALL)
CLAIM = re.compile(r'<!-- claim: ([\w-]+) (\S+) (not )?"([^"]+)" -->')
QUALITY = re.compile(r"^([\w-]+) +\d+ +(\S+ ± \S+) \(\d+\)(?: +(\S+ \[.*?\]))?", re.MULTILINE)
COST = re.compile(r"^([\w-]+)\n(?:  .*\n)*?  cost: (.+)$", re.MULTILINE)
CONTROL = r"(better|worse|no difference) (?:than|from) {}.*?(?:was shown |by (\S+) )\((\S+) to ([+-][\d.]+)"
RANDOM, DENSE = "random at the same budget", "the best dense of equal cost"


def page(root: Path) -> str:
    """Return the page with the content of the reports."""
    text = (root / PAGE).read_text(encoding="utf-8")
    return PLACE.sub(lambda match: f"{match[1]}{show_report(root, match[2])}{match[3]}", text)


def show_report(root: Path, name: str) -> str:
    """Return a report's groups: their loss, the difference to the baseline, the cost of a step, and two controls."""
    text, verdicts = _read(root, name), find_verdicts(root, name)
    quality, _, speed = text[text.index("Quality:") :].partition("\nSpeed\n")
    costs = dict(COST.findall(speed))
    rows = [
        [group, value, difference, costs.get(group, ""), *(_control(verdicts[group], kind) for kind in (RANDOM, DENSE))]
        for group, value, difference in QUALITY.findall(quality)
    ]
    return table(["group", "test loss", "to the baseline", "cost of a step", RANDOM, DENSE], rows)


def _control(verdict: str, kind: str) -> str:
    found = re.search(CONTROL.format(kind), verdict)
    return f"{found[1]}{f' by {found[2]}' if found[2] else ''} ({found[3]} to {found[4]})" if found else ""


def find_verdicts(root: Path, name: str) -> dict[str, str]:
    """Return group to verdict, from the report's JSON or, without one, from its text. The runs beside the text, if they
    are there, say what is a group: a line may begin with another word and a colon."""
    file = root / "docs" / "results" / f"{name}.json"
    if file.exists():
        groups = json.loads(file.read_text(encoding="utf-8"))["groups"]
        return {group["label"]: group["verdict"] for group in groups}
    found: dict[str, str] = {}
    runs, current = root / "docs" / "results" / f"{name}.csv", ""
    rows = runs.read_text(encoding="utf-8").splitlines() if runs.exists() else []
    groups = {row.partition(",")[0] for row in rows}
    for line in _read(root, name).rstrip().rpartition("\n\n")[2].splitlines():
        label, colon, rest = line.partition(": ")
        if colon and " " not in label and label != "warning" and (not groups or label in groups):
            current, found[label] = label, rest.strip()
        elif current:
            found[current] += f" {line.strip()}"
    return found


def find_broken(root: Path, text: str) -> list[str]:
    """Return the claims of a page that its reports do not support."""
    broken = []
    for name, groups, negated, words in CLAIM.findall(text):
        verdicts = find_verdicts(root, name)
        wanted = list(verdicts) if groups == "*" else groups.split(",")
        broken += [
            f'{name} {group} {negated}"{words}": the report says {verdicts.get(group, "nothing of it")}'
            for group in wanted
            if group not in verdicts or (words in verdicts[group]) == bool(negated)
        ]
    return broken


def _read(root: Path, name: str) -> str:
    return (root / "docs" / "results" / f"{name}.txt").read_text(encoding="utf-8")
