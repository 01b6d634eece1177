"""Many trials of each fault that a training meets: damaged checkpoints, full disks, polite signals, numbers that are
not finite, clocks that step, eight runs at once on a new store, and a run of 20,000 steps."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, State
from tests.chaos.clock import SHIFTS, Clock, needs_compiler
from tests.chaos.kill import difference, outcome
from tests.chaos.test_kills import sections
from tests.target.conftest import until
from tests.worker.conftest import start, work

SHORT: dict[str, Any] = {"training": {"max_steps": 24}, "measure": {"eval_every": 8, "probe_every": 9}}


def copy_of(run: RunFolder, number: int) -> RunFolder:
    """Copy a run's folder under an id of its own."""
    folder = run.path.parent / f"{number:012x}"
    shutil.copytree(run.path, folder)
    plan = Plan.load(folder / "plan.json")
    plan.model_copy(update={"run_id": folder.name}).save(folder)
    return RunFolder(folder)


def damage(file: Path, chance: random.Random) -> str:
    """Spoil a file in one of eight ways.

    Returns:
        The way.
    """
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content))
    ways: dict[str, bytes | None] = {
        "removed": None,
        "emptied": b"",
        "zeroed": b"\0" * len(content),
        "cut": bytes(content[:place]),
        "longer": bytes(content) + b"\0",
        "one bit": bytes([*content[:place], content[place] ^ 1 << chance.randrange(8), *content[place + 1 :]]),
        "other content": b"{}",
        "first kilobyte lost": bytes(content[1024:]),
    }
    way = chance.choice(sorted(ways))
    spoilt = ways[way]
    if spoilt is None or spoilt == content:
        file.unlink()
    else:
        file.write_bytes(spoilt)
    return way


@pytest.mark.chaos
@pytest.mark.promise("R2")
@pytest.mark.parametrize("way", ["random rows, weighted", "topk rows by example", "eager apollo-mini"])
def test_a_damaged_newest_checkpoint_falls_back_and_ends_alike(way, tiny_recipe, prepared, record_property) -> None:
    recipe = tiny_recipe(**sections(way) | SHORT | {"training": sections(way)["training"] | {"max_steps": 24}})
    straight, broken = prepared(recipe), prepared(recipe)
    assert work(straight) == 0
    process = start(broken)
    while process.is_alive() and len(list((broken.path / "checkpoints").glob("step-*"))) < 2:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    expected, chance, wrong, trials = outcome(straight), random.Random(way), [], 24
    for number in range(trials):
        run = copy_of(broken, number)
        newest = max((run.path / "checkpoints").glob("step-*"))
        file = chance.choice([path for path in sorted(newest.iterdir()) if path.stat().st_size])
        what = f"{file.name} {damage(file, chance)}"
        if work(run) != 0 or outcome(run) != expected:
            wrong.append(what)
        warned = [note for note in History.load(run.path).notes if newest.name in str(note)]
        if len(warned) != 1:
            wrong.append(f"{what}: {len(warned)} warnings")
        shutil.rmtree(run.path)
    record_property("trials", trials)
    assert not wrong


@pytest.mark.chaos
@pytest.mark.promise("R3")
def test_a_disk_that_is_full_at_any_size_keeps_what_is_good(tiny_recipe, prepared, record_property) -> None:
    recipe = tiny_recipe(**SHORT | {"checkpoint": {"every": 3}})
    straight = prepared(recipe)
    assert work(straight) == 0
    expected, chance, stopped, trials = outcome(straight), random.Random(3), 0, 30
    largest = max(file.stat().st_size for file in straight.path.rglob("*") if file.is_file())
    for _ in range(trials):
        run = prepared(recipe)
        process = start(run)
        journal = run.path / "journal.jsonl"
        steps = chance.randrange(20)
        while process.is_alive() and (not journal.exists() or journal.read_bytes().count(b'"train/loss"') <= steps):
            time.sleep(0.002)
        if process.is_alive():
            # No file of the process may grow beyond this: what a full disk does, at a place that chance decides.
            room = chance.randrange(1000, largest)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        process.join()
        stopped += process.exitcode != 0
        assert not list((run.path / "checkpoints").glob(".part-*"))
        assert work(run) == 0
        assert not difference(expected, outcome(run))
    record_property("trials", trials)
    record_property("of which", ("stopped by it", stopped))
    assert stopped >= trials // 3


@pytest.mark.chaos
@pytest.mark.promise("R4")
@pytest.mark.parametrize("way", ["random rows, weighted", "frozen in turn, at random", "tokens by loss, detached"])
def test_a_storm_of_polite_signals_ends_as_if_left_alone(way, tiny_recipe, prepared, record_property) -> None:
    recipe = tiny_recipe(**sections(way))
    straight = prepared(recipe)
    assert work(straight) == 0
    expected, chance, signals = outcome(straight), random.Random(way), 0
    for _ in range(8):
        run = prepared(recipe)
        for _ in range(4):
            process = start(run)
            journal = run.path / "journal.jsonl"
            begin = journal.stat().st_size if journal.exists() else 0
            while process.is_alive() and (not journal.exists() or journal.stat().st_size <= begin + 600):
                time.sleep(0.002)
            time.sleep(chance.random() * 0.1)
            if process.is_alive():
                os.kill(process.pid, chance.choice([signal.SIGTERM, signal.SIGINT]))
            process.join()
            assert process.exitcode in {0, 130, 143}
            signals += process.exitcode != 0
        assert work(run) == 0
        assert not difference(expected, outcome(run))
    record_property("trials", signals)


@pytest.mark.chaos
@pytest.mark.promise("R7", "R23")
@pytest.mark.parametrize("optim", ["sgd", "adamw", "rmsprop", "adagrad"])
def test_a_training_that_overflows_leaves_only_finite_checkpoints(
    optim, tiny_recipe, prepared, record_property
) -> None:
    trials = 0
    for rate in (1e3, 1e10, 1e20, 1e30, 1e37):
        for every in (1, 3):
            training = {"max_steps": 12, "learning_rate": rate, "optim": optim, "max_grad_norm": None}
            run = prepared(tiny_recipe(training=training, checkpoint={"every": every}))
            code = work(run)
            trials += 1
            for file in (run.path / "checkpoints").glob("step-*/weights.safetensors"):
                assert all(tensor.isfinite().all() for tensor in load_file(file).values()), (rate, every, file)
            if code == 0:
                model = load_file(run.path / "model" / "model.safetensors")
                assert all(tensor.isfinite().all() for tensor in model.values())
                assert run.state() is State.FINISHED
    record_property("trials", trials)


@pytest.mark.chaos
@pytest.mark.promise("R9")
@needs_compiler
@pytest.mark.parametrize("shift", SHIFTS[1:])
def test_a_clock_that_steps_between_attempts_and_at_work_changes_no_result(
    shift, tiny_recipe, prepared, tmp_path
) -> None:
    recipe = tiny_recipe(**SHORT | {"checkpoint": {"every": 3}})
    straight = prepared(recipe)
    assert work(straight) == 0
    run, clock = prepared(recipe), Clock(tmp_path)
    process = start(run)
    while process.is_alive() and len(list((run.path / "checkpoints").glob("step-*"))) < 2:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    newest = max((run.path / "checkpoints").glob("step-*"))
    command = [sys.executable, "-m", "sparsebp_cli.worker", str(run.plan_file)]
    clock.set(shift)
    resumed = subprocess.Popen(command, env=os.environ | clock.variables, stderr=subprocess.PIPE, text=True)
    until(lambda: len(History.load(run.path).environments) > 1 or resumed.poll() is not None)
    with clock.jumping(random.Random(shift)):
        _, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert max((run.path / "checkpoints").glob("step-*")) > newest
    # PyTorch's profiler stamps what it records by the time of day, so the peak of a step in which that jumps is wrong.
    found = [name for name in difference(outcome(straight), outcome(run)) if "memory/step_peak_" not in name]
    assert not found


@pytest.mark.chaos
@pytest.mark.promise("R6")
def test_eight_trainings_at_once_fill_one_new_store(tiny_recipe, home_folder, tmp_path, record_property) -> None:
    import yaml

    recipe = tiny_recipe(training={"max_steps": 100}, measure={"eval_every": 25}).model_dump(mode="json")
    recipe = {
        key: value for key, value in recipe.items() if key in {"version", "model", "dataset", "training", "measure"}
    }
    file = tmp_path / "eight.yaml"
    file.write_text(yaml.safe_dump(recipe | {"target": {"threads": 1, "device": "cpu"}}), encoding="utf-8")
    command = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", "run", str(file)]
    started = [
        subprocess.Popen([*command, "--seeds", str(seed)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for seed in range(8)
    ]
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * 8, printed
    runs = [RunFolder(path) for path in sorted((home_folder / "runs").iterdir()) if (path / "plan.json").exists()]
    assert [run.state() for run in runs] == [State.FINISHED] * 8
    points = sum(len(series) for run in runs for series in History.load(run.path).metrics.values())
    with sqlite3.connect(home_folder / "mlflow.db") as database:
        made = database.execute("select count(*) from sqlite_master where name = 'metrics'").fetchone()[0]
        stored = database.execute("select count(*) from metrics").fetchone()[0] if made else 0
    warned = sum("sparsebp sync" in text for text in printed)
    record_property("trials", 8)
    record_property("of which", ("told to sync", warned))
    assert stored == points or warned, f"{stored} of {points} points are in the store, and no run said so"


@pytest.mark.chaos
@pytest.mark.promise("R25")
def test_20000_steps_end_with_the_memory_and_speed_of_the_first(tiny_recipe, prepared, record_property) -> None:
    measure = {"eval_every": 5000, "probe_every": 5000, "fidelity_every": 5000}
    training = {"max_steps": 20_000, "learning_rate": 1e-4, "per_device_train_batch_size": 1}
    run = prepared(tiny_recipe(training=training, measure=measure, checkpoint={"every": 5000}))
    process = start(run)
    resident: list[tuple[int, int]] = []
    journal = run.path / "journal.jsonl"
    while process.is_alive():
        time.sleep(2.0)
        try:
            resident.append((journal.stat().st_size, psutil.Process(process.pid).memory_info().rss))
        except (FileNotFoundError, psutil.NoSuchProcess):
            continue
    process.join()
    assert process.exitcode == 0
    third = len(resident) // 3
    early, late = resident[third], resident[-2]
    record_property("of which", ("MB resident after a third", early[1] // 2**20))
    record_property("of which", ("MB resident at the end", late[1] // 2**20))
    record_property("of which", ("bytes of journal a step", journal.stat().st_size // 20_000))
    assert late[1] < early[1] * 1.05
    assert journal.stat().st_size < 20_000 * 2000
