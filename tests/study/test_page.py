"""What a study shows: its plan and its page fit a terminal of 100 columns and count every trial."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from sparsebp_cli.recipe import with_stop
from sparsebp_cli.run import RunFolder
from sparsebp_lab.study.course import plan_course
from sparsebp_lab.study.disk import DiskUse, measure_disk
from sparsebp_lab.study.driver import Status
from sparsebp_lab.study.loader import LoadedStudy, load_study
from sparsebp_lab.study.place import find_places
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.summary import ArmLine, summarise
from sparsebp_lab.study.trial import TrialMaker
from sparsebp_lab.verb.study import find_pause
from sparsebp_lab.verb.study_page import make_live_table, make_plan_table

from .conftest import STUDY, Write

WIDTH = 100


def lines_of(file: Path, *statuses: Status) -> tuple[LoadedStudy, list[ArmLine]]:
    """Plan a study and give its first trials these statuses."""
    loaded = load_study(file)
    maker = TrialMaker(loaded.study.study, loaded.folders)
    store = TrialStore(maker)
    course = plan_course(loaded, maker, store)
    known = {trial.run_id: status for trial, status in zip(course.trials, statuses, strict=False)}
    return loaded, summarise(loaded, course, [], known, store)


def show(content: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plan_counts_trials_that_are_not_known_yet(write_study: Write) -> None:
    loaded, lines = lines_of(write_study(STUDY.replace("tune: [0]", "tune: 5-6")))
    shown = show(make_plan_table(loaded, lines, find_places(loaded)))
    assert "tiny: 12 trials, 0 done, 12 to do" in shown
    loaded, lines = lines_of(write_study())
    shown = show(make_plan_table(loaded, lines, find_places(loaded)))
    assert "tiny: 8 trials, 0 done, 8 to do" in shown
    assert ["dense", "20", "0/2", "0/2", "4", "?", "?"] in [line.split() for line in shown.splitlines()]


def test_a_plan_without_a_test_split_warns(write_study: Write, tmp_path: Path) -> None:
    loaded, lines = lines_of(write_study())
    assert "warning" not in show(make_plan_table(loaded, lines, find_places(loaded)))
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text().replace(", test_fraction: 0.5", ""))
    loaded, lines = lines_of(tmp_path / "study.yaml")
    assert "warning: without a test split" in show(make_plan_table(loaded, lines, find_places(loaded)))


def test_the_page_counts_what_trials_do(write_study: Write) -> None:
    loaded, lines = lines_of(write_study(), Status.RUNNING, Status.FAILED)
    shown = show(make_live_table(loaded, lines, 1))
    assert "tiny: 0 of 8 trials" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["dense", "0", "1", "2", "1", "?"] in rows
    assert ["topk", "0", "0", "4", "0", "?"] in rows


def test_both_fit_100_columns_with_long_names(write_study: Write) -> None:
    text = STUDY.replace("dense: {}", f"{'n' * 64}: {{}}").replace("[5e-4, 1e-3]", "[0.00012345678, 1e-3, 2e-3, 3e-3]")
    loaded, lines = lines_of(write_study(text))
    for content in (make_plan_table(loaded, lines, find_places(loaded)), make_live_table(loaded, lines, 1)):
        assert max(map(len, show(content).splitlines())) <= WIDTH


def test_a_plan_expects_the_disk_of_what_a_finished_run_holds(write_study: Write, tmp_path: Path) -> None:
    write_study()
    base = tmp_path / "base.yaml"
    base.write_text(f"{base.read_text()}checkpoint: {{every: 10, keep_last: 2}}\n")
    loaded = load_study(tmp_path / "study.yaml")
    maker = TrialMaker(loaded.study.study, loaded.folders)
    store = TrialStore(maker)
    course = plan_course(loaded, maker, store)
    first = course.tuning[0]  # of dense
    folder = store.find(first).path / "checkpoints" / "step-00000020"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    (folder.parents[1] / "model").write_bytes(bytes(300))
    lines = summarise(loaded, course, [], {first.run_id: Status.FINISHED}, store)
    assert [line.bytes_left for line in lines] == [3 * (2 * 1000 + 300), None]
    stopped = with_stop(first.recipe, 5)  # a trial that halving cuts holds one checkpoint and no model
    assert measure_disk(store.find(first)).predict(stopped) == 1000
    for line in lines:
        line.bytes_left = 6900.0
    assert "7 to do, 13.8 kB of disk" in show(make_plan_table(loaded, lines, find_places(loaded)))


def test_looks_at_many_trials_are_rarer() -> None:
    """190 waiting trials took an eighth of a core from the one that trains."""
    assert find_pause(0.0) == 0.2
    assert find_pause(0.03) == pytest.approx(1.5)
    assert find_pause(10.0) == 5.0


def test_a_file_that_is_renamed_meanwhile_does_not_end_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    for name in ("checkpoints/step-00000020/weights", "model", ".part-target.json.1-2"):
        (tmp_path / name).write_bytes(bytes(300))
    (tmp_path / "link").symlink_to(tmp_path / "model")
    listed = os.walk

    def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in listed(folder):
            (tmp_path / ".part-target.json.1-2").unlink(missing_ok=True)
            yield found

    monkeypatch.setattr(os, "walk", walk)
    assert measure_disk(RunFolder(tmp_path)) == DiskUse(300.0, 300.0)
