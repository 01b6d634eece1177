"""The report as a file: it stands alone, holds every number, and takes no text for markup."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebp_cli.compare import REPORT_CURVES, Comparison, Question, compare_runs, write_report
from sparsebp_cli.compare.answer import answer_grid
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.compare.report.headline import make_headline
from sparsebp_cli.compare.trade import find_trades
from sparsebp_cli.compare.words import say
from sparsebp_cli.errors import UsageError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import JournalWriter, RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page, and insists that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.data = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and data.startswith("{"):
            self.data = data
        elif self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)


@pytest.fixture
def comparison(two_groups: list[RunFolder], make_run: MakeRun) -> Comparison:
    """Two groups of five seeds with layers, and a failed run whose text tries to be markup."""
    with JournalWriter(two_groups[5].path) as journal:
        journal.write("layers", step=10, values={"a": {"kept_share": 0.1, "cosine": None}})
    failed = make_run("dense", 9, end="failed", steps=3, text="</script><img src=x onerror=alert(1)>")
    return compare_runs([*two_groups, failed], Question(margin=0.2, curves=REPORT_CURVES))


def test_the_page_is_one_file_that_asks_no_network_for_anything(comparison: Comparison) -> None:
    text = render_report(comparison)
    page = Page(text)
    assert [value for _, name, value in page.attributes if name in {"src", "srcset", "action", "background"}] == []
    links = [value for _, name, value in page.attributes if name == "href"]
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    policy = next(value for tag, name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'")
    assert not re.search(
        r"@import|url\(|fetch\(|XMLHttpRequest|import\(|sendBeacon|WebSocket", text.replace("url(#", "")
    )


def test_every_table_every_verdict_and_every_run_is_in_the_text(comparison: Comparison) -> None:
    words = " ".join(Page(render_report(comparison)).text)
    for grid in (answer_grid(comparison, is_short=False), *grids(comparison, everything=True)):
        assert grid.title in words
        for row in grid.rows:
            assert all(cell in words for cell in row)
    assert "eval/loss is equal within the margin of 0.2, worse by 0.104" in words
    assert "topk-rows: not compared with random at the same budget" in words
    for run in comparison.runs:
        assert run.run_id in words


def test_text_of_a_run_is_never_markup(comparison: Comparison) -> None:
    text = render_report(comparison, "sparsebp compare '<b>'")
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in text


def test_the_drawings_have_the_numbers_of_the_comparison(comparison: Comparison) -> None:
    data = json.loads(Page(render_report(comparison)).data, parse_constant=pytest.fail)
    assert data["groups"] == ["dense", "topk-rows"]
    assert len(data["runs"]) == 10
    assert set(data["runs"][0]["curves"]) == set(REPORT_CURVES)
    difference = comparison.groups[1].quality.difference
    assert difference is not None
    assert data["differences"][0]["quality"]["high"] == difference.high
    assert data["layers"][0]["figures"] == {"kept_share": [[0.1]]}
    assert [trade["is_paired"] for trade in data["trades"]] == [True, True]


def test_the_recipes_in_it_make_the_same_runs_again(comparison: Comparison, tmp_path: Path) -> None:
    page = Page(render_report(comparison, "sparsebp compare dense topk-rows --html r.html"))
    words = "".join(page.text)
    assert "sparsebp run topk-rows.yaml --seeds 0,1,2,3,4\nsparsebp compare dense topk-rows --html r.html" in words
    recipes = [value for _, name, value in page.attributes if name == "href" and value.startswith("data:text/yaml")]
    for group, link in zip(comparison.groups, recipes, strict=True):
        file = tmp_path / f"{group.label}.yaml"
        file.write_bytes(base64.b64decode(link.partition("base64,")[2]))
        made = load_recipe(file, []).model_dump(mode="json")
        assert made["policy"][0].items() >= group.recipe["policy"][0].items()
        assert made["training"] | {"seed": 0} == group.recipe["training"] | {"seed": 0}
        assert "uri" not in yaml.safe_load(file.read_text())["tracking"]


def test_a_password_in_the_command_is_hidden(comparison: Comparison) -> None:
    text = render_report(comparison, "sparsebp compare a --from postgresql://me:CANARY@host/db")
    assert "CANARY" not in text
    assert "postgresql://***@host/db" in text


def test_the_same_comparison_gives_the_same_page(comparison: Comparison) -> None:
    assert render_report(comparison) == render_report(comparison)


def test_a_page_of_one_failed_run_is_still_a_page(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(end="failed", steps=0)
    path = write_report(compare_runs([run], Question(curves=REPORT_CURVES)), tmp_path / "r.html")
    assert run.run_id in " ".join(Page(path.read_text()).text)


@pytest.mark.parametrize("name", ["a.txt", "a", "missing/a.html"])
def test_a_report_that_cannot_be_written_is_refused_in_one_line(
    comparison: Comparison, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError) as caught:
        write_report(comparison, tmp_path / name)
    assert "\n" not in str(caught.value)


def test_no_two_of_28_groups_have_the_same_sample(make_run: MakeRun) -> None:
    runs = [make_run(f"g{n}", policy=[{"name": "topk", "keep": 0.01 * (n + 1)}], exact=False) for n in range(28)]
    samples = re.findall(r'<svg class="sample.*?</svg>', render_report(compare_runs(runs)))
    assert len(samples) == len(set(samples)) == 28


def test_what_is_drawn_is_in_tables_too_whose_rows_have_a_head(two_groups: list[RunFolder]) -> None:
    page = render_report(compare_runs(two_groups, Question(curves=REPORT_CURVES)))
    curves = page[page.index("<h2>The curves in numbers") :]
    assert "<th scope=row>20</th><td class=n>3.004 ± 0.032 (5)</td>" in curves
    assert "<h2>train/loss</h2>" in curves


def test_step_times_of_a_busy_machine_are_in_no_drawing(two_groups: list[RunFolder]) -> None:
    for run in two_groups[5:]:
        with JournalWriter(run.path, durable=False) as journal:
            for step in range(1, 21):
                journal.write("metrics", step=step, values={"host/load": 9.0})
    text = render_report(compare_runs(two_groups))
    data = json.loads(Page(text).data)
    assert data["differences"][0]["step"] is None
    assert [trade["costs"]["step_seconds"] is None for trade in data["trades"]] == [False, True]
    assert text.count("Unreliable step times are withheld: topk-rows.") == 3


def test_the_curves_of_a_test_loss_begin_with_the_validation_loss(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, metrics={"test/loss": 3.5}) for seed in range(2)]
    found = compare_runs(runs, Question(curves=REPORT_CURVES))
    data = json.loads(Page(render_report(found)).data)
    assert (data["metric"], data["course"]) == ("test/loss", "eval/loss")


def test_the_headline_of_two_groups_is_the_statement_on_quality(comparison: Comparison) -> None:
    first = say(comparison.groups[1].statements[0])
    assert make_headline(comparison) == f"topk-rows against dense: {first}."
    assert f"<p class=headline>{make_headline(comparison)}</p>" in render_report(comparison)


def test_what_differs_by_rounding_is_one_quality_and_its_headline_names_the_time(make_run: MakeRun) -> None:
    runs = [
        make_run(seconds=0.2),
        make_run("same", policy=[{"name": "lossless"}], loss=3.0 + 1e-8, seconds=0.1, claimed=0.1),
    ]
    found = compare_runs(runs)
    assert make_headline(found).startswith("same against dense: exact: what differs is rounding (")
    assert "; step time -50.0 % in these runs" in make_headline(found)
    dense, same = find_trades(found)
    assert dense.quality == same.quality


def test_the_headline_of_many_groups_names_each_by_its_outcome(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed) for seed in range(3)]
    for n in range(9):
        policy = [{"name": "topk", "keep": 0.1 * (n + 1)}]
        runs += [make_run(f"g{n}", seed, policy=policy, exact=False) for seed in range(3)]
    found = compare_runs(runs)
    outcomes = {group.statements[0].outcome for group in found.groups[1:]}
    headline = make_headline(found)
    assert headline.startswith("Against dense in eval/loss: ")
    assert all(f"{outcome}: " in headline for outcome in outcomes)
    assert sum(f"g{n}" in headline for n in range(9)) + sum(map(int, re.findall(r" and (\d+) more", headline))) == 9


def test_every_section_but_the_first_screen_is_folded_and_listed(comparison: Comparison) -> None:
    page = Page(render_report(comparison))
    anchors = {value[1:] for _, name, value in page.attributes if name == "href" and value.startswith("#")}
    folded = {value for tag, name, value in page.attributes if tag == "details" and name == "id"}
    assert anchors == folded >= {"words", "doubts", "differences", "course", "again", "table-1"}
    assert not [tag for tag, name, _ in page.attributes if tag == "details" and name == "open"]
