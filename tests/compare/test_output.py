"""What a comparison looks like: for people in 100 columns, for machines as JSON, in documents."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparsebp_cli.compare import Comparison, compare_runs, render, table
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.number import (
    BYTES,
    FLOPS,
    SECONDS,
    of_change,
    of_difference,
    of_phases,
    of_quartiles,
    of_share,
    of_spread,
    scaled,
)
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.statistics import Difference, Quartiles, Spread
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder
from tests.recipe.schema_evaluator import accepts

ROOT = Path(__file__).parent.parent.parent
MakeRun = Callable[..., RunFolder]


@pytest.fixture
def comparison(two_groups: list[RunFolder], make_run: MakeRun) -> Comparison:
    """Three groups, one of a long name, and a failed run whose text tries to be markup."""
    long: dict[str, Any] = {"policy": [{"name": "random", "keep": 0.25, "along": "rows"}], "exact": False}
    return compare_runs(
        [
            *two_groups,
            make_run(
                "random-rows-with-a-name-that-is-as-long-as-names-can-be-in-here-", 0, **long, loss=3.3, claimed=0.3
            ),
            make_run("dense", 9, end="failed", steps=12, text="[bold]|<b>the loss is nan at step 13"),
        ]
    )


def shown(comparison: Comparison, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(*table(comparison), sep="\n", crop=False)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_terminal_shows_the_recipe_differences_first_and_the_verdicts_last(comparison: Comparison) -> None:
    text = shown(comparison)
    titles = [
        "Recipe differences",
        "Quality: eval/loss",
        "Speed",
        "Memory",
        "Backward work",
        "Runs that no mean includes",
    ]
    assert [text.index(title) for title in titles] == sorted(text.index(title) for title in titles)
    assert text.startswith("Recipe differences")
    last = text[text.index("Runs that no mean includes") :]
    assert "warning: " in last
    assert last.index("dense: baseline") < last.index("topk-rows: eval/loss is worse")


def test_every_number_is_whole_in_100_columns(comparison: Comparison) -> None:
    text = shown(comparison)
    assert max(len(line) for line in text.splitlines() if not line.startswith("sparsebp ")) <= 100
    assert "…" not in text
    for whole in ("9 dense steps", "+0.104 [+0.090, +0.118]", "2.50x", "1.20 GB (process)", "200 MFLOP"):
        assert whole in text


@pytest.mark.parametrize("width", [30, 60, 80])
def test_where_a_table_has_no_room_every_number_stays_whole_beside_its_name(comparison: Comparison, width: int) -> None:
    text = shown(comparison, width)
    assert max(len(line) for line in text.splitlines() if not line.startswith("sparsebp ")) <= width
    wanted = " ".join(cell for grid in grids(comparison) for row in grid.rows for cell in row[grid.aside :]).split()
    assert Counter(wanted) <= Counter(text.split())
    speed = "".join(text[text.index("Speed") : text.index("Memory")].split())
    assert speed.index("topk-rows") < speed.index("2.50x")


def test_a_command_to_copy_is_one_line_in_the_narrowest_terminal(comparison: Comparison) -> None:
    missing = [control.command for control in comparison.controls if control.command]
    assert missing
    assert set(missing) <= set(shown(comparison, 40).splitlines())
    assert all(f"$ {command}" in render(comparison, "md").splitlines() for command in missing)


def test_what_would_steer_a_terminal_is_in_no_table(two_groups: list[RunFolder]) -> None:
    runs = [load_folder(run) for run in two_groups]
    for run in runs:
        run.recipe["note"] = f"{run.name}\x1b[2J\u202e\x9b31m\x1b]0;title\x07"
    found = compare_runs(runs)
    assert "topk-rows [2J" in shown(found)
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown(found) + render(found, "md"))


def test_text_of_a_failed_run_is_never_read_as_markup(comparison: Comparison) -> None:
    assert "failed: [bold]|<b>the loss is nan" in shown(comparison)
    assert r"failed: [bold]\|&lt;b>the loss is nan" in render(comparison, "md")


def test_json_holds_everything_and_is_strict(comparison: Comparison) -> None:
    found = json.loads(render(comparison, "json"), parse_constant=pytest.fail)
    assert found["schema"] == 6
    assert [group["label"] for group in found["groups"]][:2] == ["dense", "topk-rows"]
    assert found["groups"][1]["quality"]["difference"]["n"] == 5
    assert len(found["runs"]) == 12
    assert found["runs"][0]["curves"]["eval/loss"][0][0] == 0
    assert found["groups"][1]["changes"][1] == {"key": "policy.0.keep", "baseline": None, "value": 0.1}


def test_json_is_what_the_committed_schema_says(comparison: Comparison, make_run: MakeRun) -> None:
    schema = json.loads((ROOT / "docs" / "comparison.schema.json").read_text())
    assert schema["properties"]["schema"]["const"] == 6
    empty = compare_runs([make_run(end="failed", steps=0)])
    for each in (comparison, empty):
        found = json.loads(render(each, "json"))
        assert accepts(schema, found)
    assert not accepts(schema, found | {"schema": 1})
    assert not accepts(schema, {key: value for key, value in found.items() if key != "groups"})
    assert not accepts(schema, found | {"runs": [{}]})


def test_markdown_tables_have_as_many_cells_in_every_row(comparison: Comparison) -> None:
    text = render(comparison, "md")
    blocks = [block for part in text.split("\n\n") if (block := part.strip()).startswith("|")]
    assert len(blocks) == 8
    for block in blocks:
        counts = {line.replace("\\|", "").count("|") for line in block.splitlines()}
        assert len(counts) == 1
    assert "- **topk-rows**: eval/loss is worse by 0.104" in text


def test_an_unknown_format_is_refused_in_one_line(comparison: Comparison) -> None:
    with pytest.raises(UsageError, match=r"^the format must be one of json, md, got 'jsn'; did you mean json\?$"):
        render(comparison, "jsn")


def test_the_same_comparison_gives_the_same_text(two_groups: list[RunFolder]) -> None:
    first, second = compare_runs(two_groups), compare_runs(two_groups)
    assert first == second
    assert render(first, "json") == render(second, "json")


def test_more_than_four_recipes_are_put_side_by_side_in_several_tables(make_run: MakeRun) -> None:
    runs = [make_run()]
    for index in range(6):
        policy = [{"name": "topk", "keep": 0.1 * (index + 1), "along": "rows"}]
        runs.append(make_run(f"a-rather-long-name-{index}", policy=policy, exact=False))
    text = shown(compare_runs(runs))
    assert text.count("Recipe differences") == 2
    assert max(len(line) for line in text.splitlines() if not line.startswith("sparsebp ")) <= 100


def test_a_single_run_is_shown_without_anything_to_compare_with(make_run: MakeRun) -> None:
    text = shown(compare_runs([make_run()]))
    assert "Recipe differences" not in text
    assert "dense: baseline." in text


def test_numbers_are_short_and_have_their_unit() -> None:
    assert [scaled(x, SECONDS) for x in (1.5, 0.1824, 0.0000021, 0.0, None)] == [
        "1.50 s",
        "182 ms",
        "2.10 µs",
        "0.00 µs",
        "-",
    ]
    assert [scaled(x, BYTES) for x in (1.21e9, 512.0, 5e13)] == ["1.21 GB", "512 B", "50000 GB"]
    assert scaled(3.2e12, FLOPS) == "3.20 TFLOP"
    assert scaled(0.02, SECONDS, like=2.0) == "0.02 s"
    assert of_quartiles(Quartiles(0.2, 0.19, 1.2, 9), SECONDS) == "200 ms [190, 1200]"
    assert of_spread(Spread(3.21456, 0.0123, 5)) == "3.215 ± 0.012 (5)"
    assert of_spread(Spread(3.21456, None, 1)) == "3.215 (1)"
    assert [of_share(x) for x in (0.1, 0.034, -0.2, None)] == ["10%", "3.4%", "-20%", "-"]
    assert of_spread(Spread(5.0, 0.03, 3)) == "5.000 ± 0.030 (3)"
    assert of_spread(Spread(5.0, 0.0, 3)) == "5 ± 0 (3)"
    assert of_change(Difference(0.816, 0.804, 0.829, 3)) == "-18.4 % [-19.6, -17.1]"
    assert of_change(Difference(1.5)) == "+50.0 %"
    assert of_difference(Difference(0.104, 0.0898, 0.118, 5)) == "+0.104 [+0.090, +0.118]"
    assert of_difference(Difference(0.5, 0.5, 0.5, 3)) == "+0.50 [+0.50, +0.50]"
    assert of_difference(Difference(0.0, 0.0, 0.0, 3)) == "+0 [+0, +0]"
    assert of_phases([0.0361, 0.042, 0.0025], Quartiles(0.08, 0.08, 0.08, 9)) == "36 + 42 + 2.5 ms"
    assert of_phases([None, None], None) == "-"


def test_what_is_smaller_than_any_place_is_written_with_a_power_of_ten() -> None:
    assert of_difference(Difference(2e-10, 1e-10, 3e-10, 3)) == "+2.00e-10 [+1.00e-10, +3.00e-10]"
    assert of_spread(Spread(0.5, 2e-10, 3)) == "0.5 ± 2.0e-10 (3)"
    assert of_spread(Spread(1.0, 1e-16, 3)) == "1 ± 0 (3)"
