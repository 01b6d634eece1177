"""Table, picture, page and JSON of one comparison have the same numbers, withhold the same, bold the same."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from sparsebp_cli.compare import Comparison, Question, compare_runs, render
from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.compare.statistics import Difference, Spread
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_tools.release.card import Card
from sparsebp_tools.release.figure import compare_here, list_figures
from sparsebp_tools.release.weights import ReleasedWeights

MakeRun = Callable[..., RunFolder]
Cells = dict[str, dict[str, tuple[str, bool]]]  # label to column to the text and whether it is bold
SEEDS = 12


def draw_runs(make_run: MakeRun, draw: random.Random, *, is_tested: bool | None = None) -> list[RunFolder]:
    """Groups of random effects, seeds, costs and memory; some ran on a busy machine, some are tested on a split of its
    own."""
    runs, num_seeds, drawn = [], draw.choice((2, 3, 5)), draw.random() < 0.5
    is_tested = drawn if is_tested is None else is_tested
    noise = [draw.gauss(0.0, 0.1) for _ in range(num_seeds)]
    for number in range(draw.choice((2, 3, 4))):
        effect, seconds = (0.0, 0.2) if number == 0 else (draw.choice((-0.5, 0.0, 0.5)), draw.choice((0.06, 0.15, 0.3)))
        share, held = (1.0, 4e8) if number == 0 else (draw.choice((0.1, 0.5)), draw.choice((2e8, 4e8, 6e8)))
        policy = [{"name": "dense"}] if number == 0 else [{"name": "topk", "keep": 0.1 * number, "along": "rows"}]
        is_busy, steps = draw.random() < 0.25, draw.choice((20, 20, 10))
        for seed in range(num_seeds):
            loss = 3.0 + noise[seed] + effect + draw.gauss(0.0, 0.02)
            metrics = {"probe/dense_seconds": 0.2, "probe/policy_seconds": 0.2 * (share + 0.1 * draw.random())}
            metrics |= {"test/loss": loss + 0.1} if is_tested else {}
            run = make_run(
                f"group-{number}", seed, policy=policy, exact=number == 0, loss=loss, seconds=seconds, executed=share,
                claimed=share, steps=steps, training={"max_steps": steps}, metrics=metrics,
            )  # fmt: skip
            with JournalWriter(run.path, durable=False) as journal:
                journal.attempt = 1
                journal.write("metrics", step=6, values={"memory/step_peak_bytes": held * (1 + 0.01 * draw.random())})
                for step in range(1, steps + 1):
                    flops = {"flops/step": 1e9 * share * (1 + 0.001 * seed), "flops/step_dense": 1e9}
                    values = flops | {"flops/update": 1e7, "flops/update_dense": 1e7}
                    journal.write("metrics", step=step, values=values | ({"host/load": 9.0} if is_busy else {}))
            runs.append(run)
    return runs


def read_page(comparison: Comparison) -> Cells:
    """The first table of the report."""
    page = render_report(comparison)
    head, *rows = page[page.index("<table>") : page.index("</table>")].split("<tr>")[1:]
    columns = re.findall(r"<th[^>]*>(.*?)</th>", head)
    found: Cells = {}
    for row in rows:
        label, *cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        texts = [(html.unescape(re.sub(r"<[^>]*>", "", cell)), "<b>" in cell) for cell in cells]
        found[html.unescape(label)] = dict(zip(columns[1:], texts, strict=True))
    return found


def read_tables(comparison: Comparison, title: str, column: str) -> dict[str, tuple[str, bool]]:
    """A column of a table in the terminal."""
    grid = next((grid for grid in grids(comparison) if grid.title.startswith(title)), None)
    if grid is None:
        return {}
    place = grid.columns.index(column)
    return {row[0]: (row[place], (number, place) in grid.bold) for number, row in enumerate(grid.rows)}


def difference_of(values: dict[str, Any] | None) -> Difference | None:
    return None if values is None else Difference(**{k: v for k, v in values.items() if k not in {"pairs", "dropped"}})


def is_gain(group: dict[str, Any], subject: str, good: str) -> bool:
    outcomes = [s["outcome"] for s in group["statements"] if s["subject"] == subject]
    return bool(outcomes) and outcomes[0] in {"better", good}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_all_faces_of_a_comparison_agree(make_run: MakeRun, seed: int) -> None:
    draw = random.Random(seed)
    comparison = compare_runs(draw_runs(make_run, draw), Question(margin=draw.choice((None, 0.2))))
    data = json.loads(render(comparison, "json"))
    page = read_page(comparison)
    quality, speed, memory = (read_tables(comparison, title, "to baseline") for title in ("Quality", "Speed", "Memory"))
    step = read_tables(comparison, "Speed", "step")
    levels = read_tables(comparison, "Quality", data["metric"])
    for group in data["groups"]:
        label, cells, is_base = group["label"], page[group["label"]], group["baseline"]
        level = group["quality"]["final"]
        assert levels[label][0] == (show.of_spread(Spread(**level)) if level else "-")
        ratio = difference_of(group["speed"]["step_ratio"])
        change, held = (show.of_change(one) for one in (ratio, difference_of(group["cost"]["held_ratio"])))
        expected = "" if is_base else show.of_difference(difference_of(group["quality"]["difference"]))
        gains = {
            "to baseline": is_gain(group, "quality", data["better"]),
            "speed": is_gain(group, "step time", "lower"),
            "memory": is_gain(group, "memory", "lower"),
        }
        assert cells["to baseline"][0] == expected
        assert {column: is_bold for column, (_, is_bold) in cells.items() if is_bold or column in gains} == gains
        if not is_base:
            assert quality[label] == (expected, gains["to baseline"])
            assert speed[label] == ("withheld" if group["speed"]["withheld"] else change, gains["speed"])
            assert memory[label] == (held, gains["memory"])
        is_hidden = bool(group["speed"]["withheld"]) and group["speed"]["step"] is None
        assert (step[label][0] == "withheld") == is_hidden
        if group["speed"]["withheld"]:
            assert ratio is None
            assert cells["speed"] == ("withheld", False)
            assert not [s for s in group["statements"] if s["subject"] == "step time" and s["numbers"]]
        assert cells["cost"][0] == f"{group['speed']['cost']['mean']:.2f}"


def test_the_random_comparisons_hold_what_the_faces_have_to_agree_on(make_run: MakeRun) -> None:
    seen: set[str] = set()
    for seed in range(SEEDS):
        draw = random.Random(seed)
        found = compare_runs(draw_runs(make_run, draw), Question(margin=draw.choice((None, 0.2))))
        for group in found.groups:
            seen |= {f"{s.subject}: {s.outcome}" for s in group.statements}
            seen |= {"withheld"} if group.speed.withheld else set()
            seen |= {"drift"} if "speed changed" in group.speed.withheld else set()
            seen |= {"gain"} if found.is_gain(group, "quality") else set()
    wanted = {"withheld", "drift", "gain", "step time: lower", "step time: no statement", "memory: lower"}
    assert wanted <= seen


def write_card(run: RunFolder) -> str:
    plan = Plan.load(run.plan_file)
    history, weights = History.load(run.path), ReleasedWeights(20, "last")
    figures = list_figures(run, weights, history)
    return Card(run, plan, history, weights, figures, compare_here(run, plan), "LlamaForCausalLM").render("mine")


def test_the_card_of_a_model_says_beside_dense_what_compare_says(
    two_groups: list[RunFolder], make_run: MakeRun
) -> None:
    dense, sparse = two_groups[:5], two_groups[5:]
    make_run("longer", 0, loss=1.0, training={"max_steps": 10}, steps=10)  # another question: not beside these
    make_run("dense", 7, loss=1.0, end="failed")
    found = compare_runs(two_groups)
    (said,) = (group.verdict for group in found.groups if group.group != found.baseline)
    assert "worse" in said
    card = " ".join(write_card(sparse[0]).split())
    assert f"Compared with dense training of the same recipe: {said}" in card
    assert "was not compared with dense" not in card
    assert "Beside dense" not in write_card(dense[0]), "of itself there is nothing to say"


def test_the_card_of_a_model_without_dense_runs_says_that_nobody_knows(make_run: MakeRun) -> None:
    policy = [{"name": "topk", "keep": 0.1, "along": "rows"}]
    runs = [make_run("topk", seed, policy=policy, exact=False) for seed in range(3)]
    card = write_card(runs[0])
    assert "the loss of quality through its policy is unknown" in card
    assert "Beside dense" not in card


@pytest.mark.parametrize(
    ("dataset", "judged", "is_asked"),
    [
        ({"name": "none", "format": "chat", "eval_split": "train"}, "trained", True),
        ({"name": "none", "format": "text"}, "held-out", False),
    ],
)
def test_the_card_says_what_the_model_was_judged_on_and_how_to_ask_it(
    make_run: MakeRun, dataset: dict[str, str], judged: str, is_asked: bool
) -> None:
    card = " ".join(write_card(make_run("mine", 0, dataset=dataset)).split())
    assert f"It was judged on {judged} examples of `none` alone" in card
    assert ("held-out" in card) is (judged == "held-out")
    assert ("add_generation_prompt=True" in card) is is_asked
