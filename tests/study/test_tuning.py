"""The tuning in the report: a table over the varied keys, and the key that decided a known objective."""

from __future__ import annotations

import itertools
import tarfile
from pathlib import Path

import pytest

from sparsebp_cli.run import home, list_runs
from sparsebp_cli.run.label import Labels
from sparsebp_lab.study.selection import TunedLine
from sparsebp_lab.study.tuning import find_importances, make_tuning_grids, read_combination

from .conftest import STUDY, Cli, Write


def line(combination: str, value: float | None, *, chosen: bool = False, pruned: bool = False) -> TunedLine:
    return TunedLine("dense", combination, (0,), "eval/loss", value, chosen, pruned)


def test_two_keys_make_a_table_of_rows_and_columns() -> None:
    lines = [
        line("learning_rate=0.1 keep=0.25", 3.0),
        line("learning_rate=0.1 keep=0.5", 2.0, chosen=True),
        line("learning_rate=0.2 keep=0.25", None, pruned=True),
        line("learning_rate=0.2 keep=0.5", None),
    ]
    (grid,) = make_tuning_grids(lines)
    assert grid.columns == ("learning_rate", "keep=0.25", "keep=0.5")
    assert grid.rows == (("0.1", "3.0000", "2.0000 chosen"), ("0.2", "pruned", "none"))
    (sampled,) = make_tuning_grids(lines[:3])  # a search leaves holes
    assert sampled.columns == ("learning_rate", "keep", "eval/loss")


def test_a_value_with_blanks_belongs_to_its_key() -> None:
    found = read_combination("policy=[{'name': 'topk', 'keep': 0.5}] learning_rate=0.1")
    assert found == {"policy": "[{'name': 'topk', 'keep': 0.5}]", "learning_rate": "0.1"}


def test_the_key_that_decides_has_the_largest_share() -> None:
    rates, names, steps = (0.001, 0.003, 0.01, 0.03), ("adamw", "sgd"), (0, 4)
    results = [
        ({"learning_rate": str(rate), "optim": name, "warmup_steps": str(step)}, abs(rate - 0.01) * 100 + 0.01 * step)
        for rate, name, step in itertools.product(rates, names, steps)
    ]
    found = find_importances(results)
    assert next(iter(found)) == "learning_rate"
    assert found["learning_rate"] > 0.9
    assert sum(found.values()) == pytest.approx(1.0)
    lines = [line(" ".join(f"{key}={one}" for key, one in values.items()), value) for values, value in results]
    grid = make_tuning_grids(lines)[-1]
    assert grid.title == "Which key mattered"
    assert grid.rows[0][1] == "learning_rate"
    assert not [one for one in make_tuning_grids(lines[:7]) if one.title == grid.title]  # too few


@pytest.mark.slow
def test_the_report_of_a_study_holds_its_tuning(cli: Cli, write_study: Write) -> None:
    file = write_study(STUDY)
    assert cli("study", file).returncode == 0
    html = file.parent / "report.html"
    done = cli("compare", "--study", "tiny", "--html", html)
    assert done.returncode == 0, done.stderr
    page = html.read_text()
    assert "Tuning of topk: eval/loss" in page
    assert "3.0000 chosen" in page


@pytest.mark.slow
def test_verbs_for_several_runs_take_a_study_by_its_name(cli: Cli, write_study: Write, tmp_path: Path) -> None:
    assert cli("study", write_study()).returncode == 0
    runs = {run.run_id for run in list_runs()}
    done = cli("archive", "@tiny", "--to", "tiny.tar.gz")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "tiny.tar.gz") as archive:
        assert runs <= {part for name in archive.getnames() for part in name.split("/")}
    assert cli("tag", "@tiny", "paper").returncode == 0
    assert {run.run_id for run in list_runs() if "paper" in Labels.load(run.path).tags} == runs
    assert "@tinny: there are 8 runs" in cli("rm", "@tinny", "--yes").stderr
    newest = list_runs()[0]
    for name in ("last", "1"):  # a study of such a name does not take the word for the newest runs
        (home() / "studies" / f"{name}.json").write_text((home() / "studies" / "tiny.json").read_text())
        assert cli("tag", f"@{name}", f"newest-{name}").returncode == 0
        assert [run for run in list_runs() if f"newest-{name}" in Labels.load(run.path).tags] == [newest]
    (home() / "studies" / "paper.json").write_text((home() / "studies" / "tiny.json").read_text())
    done = cli("rm", "@paper", "--yes")
    assert (done.returncode, "@paper is the name of a study and also a tag" in done.stderr) == (2, True)
    assert {run.run_id for run in list_runs()} == runs
    done = cli("rm", "@tiny", "--yes")
    assert done.returncode == 0, done.stderr
    assert not list_runs()
