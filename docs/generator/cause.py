"""What the test of cause says, from what benchmarks/cause.py wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from generator.markdown import table

PLACE = re.compile(r"(<!-- cause -->\n).*?(<!-- end of cause -->)", re.DOTALL)
SHAPES = {"batch": "batch (control)", "isotropic": "isotropic", "projection": "projection"}
PREDICTORS = {
    "curved": "by curvature",
    "all": "all directions",
    "curved and rate": "by curvature, with the rate",
    "as dense": "equal dense",
}
VERDICTS = {
    "cause": "variance by curvature is the cause",
    "refused": "variance by curvature is not the cause by itself",
    "open": "open",
}
CLAIMS = {
    "C0": "noise of the batch's shape is on dense's curve",
    "C1": "so are isotropic noise and that of a projection",
    "C2": "so are these in the first moment alone",
    "C3": "in the second moment alone they give 0.8 of the rise",
    "C4": "with the rate, the error over added noise is at most half",
    "C5": "the same over methods",
}


def page(root: Path) -> str:
    """Return the page with what is known."""
    text = (root / "docs" / "results" / "screening.md").read_text(encoding="utf-8")
    assert len(PLACE.findall(text)) == 1, "screening.md lost the place of the test of cause"
    made = describe(root / "docs" / "results" / "cause")
    return PLACE.sub(lambda match: f"{match[1]}{made}{match[2]}", text)


def describe(folder: Path) -> str:
    """Return verdict and tables; without a whole round, how many runs there are."""
    file = folder / "summary.json"
    if not file.exists():
        number = sum(len(each.read_text(encoding="utf-8").splitlines()) - 1 for each in folder.glob("*.csv"))
        return f"**Not decided yet.** {number} runs are trained, and no round of both tasks is whole.\n"
    record = json.loads(file.read_text(encoding="utf-8"))
    tasks, rounds = record["tasks"], record["rounds"]
    verdict = f"**Verdict after {rounds} rounds: {VERDICTS[record['verdict']]}.**\n"
    return "\n".join((verdict, _outcomes(tasks), _slopes(tasks), _errors(tasks), _rises(tasks)))


def decide(task: Mapping[str, Any]) -> dict[str, str]:
    """Return what became of each hypothesis on a task."""
    slopes, errors = task["slopes"], task["predictors"]
    return {
        "C0": _all_on([slopes["batch"]]),
        "C1": _all_on([slopes["isotropic"], slopes["projection"]]),
        "C2": _all_on([task["first"]["isotropic"], task["first"]["projection"]]),
        "C3": _holds(all(task["second"][shape]["value"] >= 0.8 for shape in ("isotropic", "projection"))),
        "C4": _holds(_is_half(errors["added"])),
        "C5": _holds(_is_half(errors["methods"])),
    }


def _all_on(found: Iterable[Mapping[str, Any]]) -> str:
    outcomes = {one["outcome"] for one in found}
    return "refused" if "off" in outcomes else _holds(True) if outcomes == {"on"} else "open"


def _is_half(errors: Mapping[str, Any]) -> bool:
    both, one, other = (errors[key]["root_mean_square"] for key in ("curved and rate", "curved", "all"))
    return bool(both <= 0.5 * min(one, other))


def _holds(does: bool) -> str:
    return "holds" if does else "refused"


def _outcomes(tasks: Mapping[str, Any]) -> str:
    found = [decide(task) for task in tasks.values()]
    rows = [(f"{name}: {claim}", *(one[name] for one in found)) for name, claim in CLAIMS.items()]
    return table(("hypothesis", *(f"*{name}*" for name in tasks)), rows)


def _slopes(tasks: Mapping[str, Any]) -> str:
    heads = ("task", "shape", "both moments: slope", "first moment alone: slope", "second moment alone: share")
    rows = [
        (f"*{name}*", shown, *(_interval(task[kind][shape]) for kind in ("slopes", "first", "second")))
        for name, task in tasks.items()
        for shape, shown in SHAPES.items()
    ]
    return table(heads, rows)


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}], {found['outcome']}"


def _errors(tasks: Mapping[str, Any]) -> str:
    heads = ("root mean square", *(f"*{name}*, {group}" for name in tasks for group in ("added noise", "methods")))
    rows = []
    for key, shown in PREDICTORS.items():
        groups = (task["predictors"][group] for task in tasks.values() for group in ("added", "methods"))
        rows.append((shown, *(f"{group[key]['root_mean_square']:.3f}" for group in groups)))
    return table(heads, rows)


def _rises(tasks: Mapping[str, Any]) -> str:
    columns = ("rise", "nu_H", "nu", "rate", "rate at the end")
    heads = ("arm", *(f"*{name}*: {column}" for name in tasks for column in columns))
    arms = [arm for arm in next(iter(tasks.values()))["rises"] if arm != "dense-16"]
    return table(heads, [(arm, *(cell for task in tasks.values() for cell in _cells(task, arm))) for arm in arms])


def _cells(task: Mapping[str, Any], arm: str) -> tuple[str, ...]:
    rise, noise, end = task["rises"][arm], task["predictors"]["noise"].get(arm), f"{task['shrunk'][arm]:.2f}"
    error = "" if rise["error"] is None else f" ± {rise['error']:.3f}"
    said = ("", "", "") if noise is None else (f"{noise['curved']:.2f}", f"{noise['all']:.3g}", f"{noise['rate']:.2f}")
    return (f"{rise['mean']:.3f}{error}", *said, "" if arm.startswith("slow") else end)
