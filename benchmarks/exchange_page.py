"""Draws what `exchange_result.py` found: one picture and one table a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

LEFT, RIGHT, TOP, BOTTOM = 62.0, 620.0, 14.0, 420.0  # of the picture, in its own units
MOST_LABELS = 6
LETTER, LINE = 6.6, 12.0  # a letter's width and a line's height of a label
ANSWERS = {True: "holds", False: "does not hold", None: "cannot be said yet"}
SHORT = {True: "holds", False: "refused", None: "open"}
# The protocol has the whole of each.
CLAIMS = {
    "H1": "the noise of an unbiased method says its loss (R² at least 0.9)",
    "H2": "biased methods are worse than their noise says (four of five)",
    "H3": "the noise orders all methods (rank correlation at least 0.8)",
    "H4": "nothing whose product is above 1 beats the best batch of dense",
    "H5": "the noise by curvature says the loss (R² at least 0.75, half of H1's difference)",
    "H6": "the loss lies between the two predictions (nine of ten)",
    "H7": "noise by curvature and the rate that AdamW leaves say the loss (R² at least 0.9)",
    "H8": "a larger rate brings back what a shorter step loses (half of it)",
    "H9": "the smallest product by curvature, without clearly biased methods, is a good choice (0.05 nats)",
    "H10": "of the methods that could win by curvature, the one with the smallest product is better than dense",
}


def render(tasks: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    loader = jinja2.ChoiceLoader(
        [jinja2.FileSystemLoader(Path(__file__).parent / "page"), jinja2.PackageLoader("sparsebp_cli.compare.page", "")]
    )
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["embed"] = lambda name: Markup(loader.get_source(environment, name)[0])
    shown = [{**task, "rows": sort(task["rows"]), "lines": describe(task), "pictures": draw(task)} for task in tasks]
    # What the hypotheses were found on comes first, what is under way last.
    shown.sort(key=lambda task: (not task["rows"], -len(task["no_test"])))
    return environment.get_template("exchange.html").render(tasks=shown, outcomes=list_outcomes(shown)) + "\n"


def list_outcomes(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return of each hypothesis its claim and, task by task, what became of it and whether that is a test."""
    return [
        {
            "name": name,
            "claim": claim,
            "tasks": [
                {"text": SHORT[task["hypotheses"][name]], "is_test": name not in task["no_test"]}
                for task in tasks
                if task["rows"]
            ],
        }
        for name, claim in CLAIMS.items()
    ]


def sort(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by what was predicted of them, those without a prediction last."""
    return sorted(rows, key=lambda row: (row["predicted"] is None, row["predicted"] or row["noise"]))


def describe(task: Mapping[str, Any]) -> list[str]:
    """Say what became of each hypothesis."""
    scores, outcome = task["scores"], task["hypotheses"]
    number, beaten = len(task["rows"]), ", ".join(scores["beat_their_verdict"]) or "none"
    unsaid = "too few unbiased arms"
    fit = unsaid
    if scores["r2"] is not None:
        fit = (
            f"over {scores['unbiased']} unbiased arms R² is {scores['r2']:.2f} (claimed: at least 0.9), the difference "
            f"{scores['root_mean_square']:.3f} nats (root mean square); {scores['within']} of {scores['unbiased']} lie "
            "within their predicted interval"
        )
    order = (
        "not all arms are trained"
        if scores["spearman"] is None
        else f"rank correlation over all {number} arms {scores['spearman']:.2f}"
    )
    found = {
        "H1": fit,
        "H2": f"{scores['biased_above']} of {scores['biased']} clearly biased arms lie above the line",
        "H3": order,
        "H4": f"arms with a product above 1 that were lower than dense at one price: {beaten}",
        "H5": unsaid,
        "H6": f"{scores['bracketed']} of {scores['both']} unbiased arms lie between the two predictions and their "
        "intervals",
    }
    if scores["r2_curved"] is not None:
        found["H5"] = (
            f"with the noise by curvature R² over {scores['curved']} unbiased arms is {scores['r2_curved']:.2f} "
            f"(claimed: at least 0.75), the difference {scores['root_mean_square_curved']:.3f} nats; over the "
            f"{scores['both']} arms with both predictions that is {scores['ratio_curved']:.2f} of the difference by "
            "the noise in all directions (claimed: at most 0.5)"
        )
    found["H7"] = "dense's surface says too few of its predictions, since rates below this one are missing"
    if scores["r2_rated"] is not None:
        found["H7"] = (
            f"with the share of the rate that AdamW leaves, R² over {scores['rated']} unbiased arms is "
            f"{scores['r2_rated']:.2f} (claimed: at least 0.9), the difference "
            f"{scores['root_mean_square_rated']:.4f} nats (claimed: below the "
            f"{scores['root_mean_square_unrated']:.4f} of these arms without it, where R² is "
            f"{scores['r2_unrated']:.2f})"
        )
    found["H8"] = "not trained"
    if back := scores["way_back"]:
        found["H8"] = (
            f"at the rate over its share the mean distance of {', '.join(back['arms'])} to dense goes from "
            f"{back['before']:.3f} to {back['after']:.3f} nats (claimed: to half of it or less)"
        )
    found["H9"] = "not all arms are trained"
    if choice := scores["fair_regret"]:
        found["H9"] = (
            f"among the arms that are not clearly biased the smallest product by curvature chooses {choice['chosen']}; "
            f"at the price of 60 dense steps {choice['best']} is best of all, {choice['nats']:.3f} nats are lost "
            "(claimed: at most 0.05)"
        )
        if choice["dense_nats"] is not None:
            found["H9"] += f"; always choosing dense costs {choice['dense_nats']:.3f}"
    found["H10"] = "sparsebp worth said of no method that it could win, or not all arms are trained"
    if advice := scores["advice"]:
        found["H10"] = (
            f"of {', '.join(advice['named'])}, which could win by curvature, the smallest product is that of "
            f"{advice['chosen']}; at the price of 60 dense steps dense's loss less its own is {advice['gain']:.3f} "
            "nats (claimed: above 0)"
        )
    lines = [*_say_order(scores)] if task["rows"] else []
    lines += [f"Committed after the data that it judges: {task['late']}"] if task["rows"] and task.get("late") else []
    lines += [f"{name} {ANSWERS[outcome[name]]}: {text}." for name, text in found.items()]
    if task["rows"]:
        below = ", ".join(f"{arm} by {by:.4f} ± {half:.4f}" for arm, (by, half) in scores["below_best_dense"].items())
        lines.append(
            f"At the price of 60 dense steps the best batch of dense is {scores['best_dense']['batch']}, at "
            f"{scores['best_dense']['loss']:.3f}; lower than that: {below or 'nothing'}."
        )
    if regret := scores["regret"]:
        lines.append(
            f"At the price of 60 dense steps the smallest product chooses {regret['chosen']}, training chooses "
            f"{regret['best']}: {regret['nats']:.3f} nats are lost by not training them all."
        )
    if task["no_test"]:
        lines.append(f"Written when this task was known, so no test here: {', '.join(task['no_test'])}.")
    if task["unpredicted"]:
        lines.append(f"No prediction, because dense would need a batch below 1: {', '.join(task['unpredicted'])}.")
    return lines


def _say_order(scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield what noise by curvature says of the order and the loss of unbiased methods."""
    if scores["spearman_curved"] is not None:
        yield f"Noise by curvature orders the unbiased methods: rank correlation {scores['spearman_curved']:.2f}."
    if scores["r2_methods"] is not None:
        yield (
            f"Without dense and the three uniform draws of examples, which are a smaller batch by construction, its R² "
            f"over {scores['methods']} methods is {scores['r2_methods']:.2f}; with them {scores['r2_curved']:.2f}. "
            f"The difference of these methods is {scores['root_mean_square_methods']:.4f} nats (root mean square); the "
            f"prediction that every method equals dense has {scores['root_mean_square_as_dense']:.4f}."
        )


def draw(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the picture of each kind of prediction."""
    pictures = [place(task, "predicted loss", task["rows"])]
    for kind, axis in (("curved", "noise by curvature"), ("rated", "noise by curvature and the rate that is left")):
        rows = [
            row | row[kind] | {"predicted": row[kind]["value"], "surprise": row[f"surprise_{kind}"]}
            for row in task["rows"]
            if row["unbiased"] and row[kind] is not None
        ]
        if len(rows) > 2:
            pictures.append(place(task, f"predicted loss, {axis}, unbiased arms", rows))
    return pictures


def place(task: Mapping[str, Any], axis: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the coordinates of a picture. Its range is that of dense's surface, and a tenth on both sides."""
    losses = [loss for loss in task["surface"].values() if loss is not None]
    span = max(losses) - min(losses)
    low, high = min(losses) - span / 10, max(losses) + span / 10
    step = next(step for step in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if span / step <= 8)

    def across(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (min(max(value, low), high) - low) / (high - low), 1)

    def up(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (min(max(value, low), high) - low) / (high - low), 1)

    shown = [
        row
        for row in rows
        if row["surprise"] is not None and low <= row["predicted"] <= high and low <= row["observed"] <= high
    ]
    far = sorted(shown, key=lambda row: -abs(row["surprise"]))[:MOST_LABELS]
    first = -(-low // step)
    ticks = [round((first + number) * step, 4) for number in range(int((high - first * step) / step) + 1)]
    return {
        "axis": axis,
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
        "ticks": [{"x": across(tick), "y": up(tick), "text": f"{tick:g}"} for tick in ticks],
        "points": [
            {
                "x": across(row["predicted"]),
                "y": up(row["observed"]),
                "low": across(row["low"]),
                "high": across(row["high"]),
                "unbiased": row["unbiased"],
                "text": f"{row['arm']}: predicted {row['predicted']:.3f}, observed {row['observed']:.3f}",
            }
            for row in shown
        ],
        "labels": name_points([(across(row["predicted"]), up(row["observed"]), row["arm"]) for row in far]),
    }


def name_points(points: Sequence[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Return a label for each point, right, left, above or below of it; none where all four are taken."""
    labels: list[dict[str, Any]] = []
    for x, y, text in points:
        width = LETTER * len(text)
        for left, base in ((x + 8, y + 4), (x - 8 - width, y + 4), (x - width / 2, y - 8), (x - width / 2, y + 16)):
            is_inside = left >= LEFT and left + width <= RIGHT and TOP + LINE <= base <= BOTTOM
            if is_inside and not any(
                left < other["x"] + LETTER * len(other["text"])
                and other["x"] < left + width
                and abs(base - other["y"]) < LINE
                for other in labels
            ):
                labels.append({"x": round(left, 1), "y": round(base, 1), "text": text})
                break
    return labels
