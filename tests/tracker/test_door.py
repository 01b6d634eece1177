"""The journal reaches the trackers that a recipe names, whatever becomes of them."""

from __future__ import annotations

import math
import os
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.errors import RecipeError, TrackingError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import check, load_recipe
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.tracker import TrackedRun, find_tracker, find_tracker_problems, list_trackers
from sparsebp_cli.tracking import Follower
from sparsebp_tools.tracker.door import Door, describe_run, send_to
from tests.tracking.material import attempt

from .conftest import Install, MakeRun, load_events, read_lines, read_tensorboard, read_trackio

NOWHERE = "sqlite:////dev/null/mlflow.db"  # cannot be made, which is told before mlflow is imported
STEPS = [("time/step_seconds", 1), ("time/step_seconds", 2), ("train/loss", 1), ("train/loss", 2)]


def describe(run: RunFolder) -> TrackedRun:
    return describe_run(Plan.load(run.plan_file))


def find_file(run: RunFolder) -> Path:
    (file,) = (describe(run).home / "tensorboard" / describe(run).title).iterdir()
    return file


def test_tensorboard_has_the_numbers_the_recipe_and_how_it_ended(make_run: MakeRun) -> None:
    run = make_run(2)
    with JournalWriter(run.path) as journal:
        journal.write("metrics", step=3, values={"train/loss": math.inf})
        journal.write("note", level="warning", text="the server http://me:CANARY@host is slow")
        journal.write("note", level="detail", text="of no interest")
        journal.write("end", status="failed", step=3, text="token=CANARY")
    door, problem = send_to(run, "tensorboard")
    assert (door.points_sent, problem, door.place) == (5, "", str(describe(run).home / "tensorboard"))
    events = load_events(describe(run))
    records = [record for record in _records(run) if record["kind"] == "metrics"]
    assert [event.wall_time for event in events.Scalars("train/loss")] == [one["time"] for one in records]
    assert [event.value for event in events.Scalars("train/loss")] == [3.0, 1.5, math.inf]
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)] for tag in ("notes", "end")
    }
    assert texts == {
        "notes": ["warning: the server http://***@host is slow"],
        "end": ["finished all is well", "failed token=***"],
    }
    assert '"learning_rate": 0.0003' in events.Tensors("recipe")[0].tensor_proto.string_val[0].decode()


def _records(run: RunFolder) -> list[Any]:
    from sparsebp_cli.run import read

    return [record for record, _ in read(run.path)]


def test_every_byte_of_an_event_file_follows_from_the_journal(make_run: MakeRun) -> None:
    run = make_run(9)
    send_to(run, "tensorboard")
    file = find_file(run)
    whole = file.read_bytes()
    for size in (0, 1, 11, 100, len(whole) // 2, len(whole) - 1):  # where a kill may have cut a write
        os.truncate(file, size)
        assert send_to(run, "tensorboard")[1] == ""
        assert file.read_bytes() == whole
    file.write_bytes(whole[:200] + b"something else" + whole[200:])
    send_to(run, "tensorboard")
    assert file.read_bytes() == whole


def test_an_event_file_that_is_removed_while_a_session_lives_is_written_again(make_run: MakeRun) -> None:
    run = make_run(2, end=None)
    door = Door(run, "tensorboard")
    door.send()
    find_file(run).unlink()
    attempt(run, 2, 4)
    door.send()
    assert sorted(read_tensorboard(describe(run)))[:1] == [("time/step_seconds", 1, pytest.approx(0.1))]
    assert len([*read_tensorboard(describe(run))]) == 8


def test_trackio_lists_the_run_with_its_settings_and_rows(make_run: MakeRun, trackio_folder: Path) -> None:
    import trackio

    run = make_run(2, experiment="my study")
    door, problem = send_to(run, "trackio")
    assert (problem, Path(door.place).parent) == ("", trackio_folder)
    (found,) = trackio.Api().runs("my study")
    assert (found.id, found.name) == (run.run_id, describe(run).title)
    assert (found.config["training.learning_rate"], found.config["model.name"]) == (0.0003, "m")
    assert sorted((name, step) for name, step, _ in read_trackio(describe(run))) == STEPS


def test_a_resumed_run_has_each_number_once(make_run: MakeRun, install: Install) -> None:
    install(lines="sparsebp_lines:lines")
    run = make_run(4, end="interrupted")
    send_to(run, "lines")
    attempt(run, 2, 6, bias=1.0)
    door, _ = send_to(run, "lines")
    assert door.points_sent == 12
    losses = {step: value for name, step, value in read_lines(describe(run)) if name == "train/loss"}
    assert losses == {1: 3.0, 2: 1.5, 3: 1.0, 4: 0.75, 5: 1.6, 6: 1.5}
    assert len([*read_lines(describe(run))]) == 12


def test_a_tracker_that_fails_is_one_warning_and_hurts_no_other(make_run: MakeRun, install: Install) -> None:
    install(lines="sparsebp_lines:lines", down="sparsebp_lines:down")
    run = make_run(2, uri=NOWHERE, also=["down", "lines"])
    journal = run.journal_file.read_bytes()
    said: list[str] = []
    follower = Follower(run, every=0.01, warn=said.append).start()
    pause = threading.Event()
    while len([*read_lines(describe(run))]) < 4 or len(said) < 2:  # of the store, which is none, and of `down`
        pause.wait(0.01)
    advice = follower.stop().advice(run.run_id)
    told = [text for text in said if "tracker" in text]
    assert told == [
        "tracker 'down' failed: http://***@tracker does not answer; the event log keeps everything, "
        f"`sparsebp sync {run.run_id} --to down` sends it later"
    ]
    assert told[0] in advice
    assert "lines" not in advice
    assert run.journal_file.read_bytes() == journal
    assert len(said) == 2


def test_a_tracker_that_hangs_does_not_hold_the_end_of_a_run(make_run: MakeRun, install: Install) -> None:
    install(hung="sparsebp_lines:hung")
    run = make_run(2, uri=NOWHERE, also=["hung"])
    follower = Follower(run, every=0.01, within=0.5).start()
    assert "tracker 'hung' took longer than 0.5 s;" in follower.stop().advice(run.run_id)


def test_a_broken_tracker_is_shown_by_its_name_and_package(install: Install) -> None:
    install(absent="sparsebp_lines:nothing", wrong="sparsebp_lines:wrong", lines="sparsebp_lines:lines", mlflow="x:y")
    broken = "of sparsebp-lines 0.1.0 is broken:"
    assert list_trackers() == ["absent", "lines", "mlflow", "tensorboard", "trackio", "wrong"]
    assert [*find_tracker_problems()] == [
        f"tracker 'absent' {broken} AttributeError: module 'sparsebp_lines' has no attribute 'nothing'",
        f"tracker 'mlflow' {broken} its name must be lower-case letters, digits, - and _, and not mlflow",
        f"tracker 'wrong' {broken} sparsebp_lines:wrong is no Tracker",
    ]
    from sparsebp_cli.cli.checkup import check_trackers

    assert [(found.level, found.what) for found in check_trackers()] == [("warn", "tracker")] * 3


def test_a_recipe_that_names_no_tracker_that_can_be_used_is_refused(tmp_path: Path, install: Install) -> None:
    install(lacking="sparsebp_lines:lacking")
    file = tmp_path / "mine.yaml"
    text = "version: 1\nname: mine\nmodel: {name: m}\ndataset: {name: d}\ntracking:\n  also: [tensorbord]\n"
    file.write_text(text)
    with pytest.raises(
        RecipeError, match=r"mine.yaml:6:\d+: tracking.also.0: unknown tracker 'tensorbord', allowed: .*"
    ):
        load_recipe(file)
    with pytest.raises(
        RecipeError, match=r"tracking.also.0: tracker 'lacking' needs nothing_of_this_name: pip install"
    ):
        load_recipe(file, ["tracking.also=[lacking]"])
    with pytest.raises(UsageError, match="MLflow records every run"):
        find_tracker("mlflow")
    assert load_recipe(file, ["tracking.also=[tensorboard]"]).tracking.also == ["tensorboard"]


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_says_which_package_has_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("sparsebp_cli.tracker.contract.entry_points", lambda group: metadata.EntryPoints())
    line = f"tracker '{name}' is in the package sparsebp-tools: python -m pip install sparsebp-tools"
    with pytest.raises(UsageError, match=f"^{line}"):
        find_tracker(name)


def test_a_run_without_a_plan_or_a_folder_is_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(1)
    run.plan_file.unlink()
    for folder in (run, RunFolder(tmp_path / "gone")):
        with pytest.raises(TrackingError):
            Door(folder, "tensorboard").send()
    assert not (tmp_path / "gone").exists()


def test_a_recipe_with_a_tracker_says_how_to_get_what_feeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.tracker.contract.find_tool", lambda name: None)
    (error,) = check._find_missing_trackers(["tensorboard"])
    assert error.location == ("tracking", "also", 0)
    assert "is in the package sparsebp-tools: python -m pip install sparsebp-tools" in error.text
