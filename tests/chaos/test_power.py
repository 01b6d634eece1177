"""Power cuts: whole stories on a file system of their own, whose disk is copied at random moments.

What a copy holds is what a disk holds when the power fails at that moment: what was written and not synced is in the
memory of the system alone. The disk is a file on an XFS, which clones it within a moment, so that a copy is of one
moment. It is mounted as after a power cut, and the file system recovers what its log has.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sparsebp_cli.run import RunFolder, State, manifest
from sparsebp_cli.run.journal import OUTLINE, scan
from tests.cli.test_real_worker import RECIPE
from tests.study.conftest import COMMAND as FAKE_STUDY
from tests.study.conftest import write_study
from tests.target.conftest import make_run
from tests.target.fake import FakeTarget
from tests.worker.conftest import tiny_folder

__all__ = ["tiny_folder", "write_study"]

COMMAND = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
DISK_MIB, OUTER_MIB = 400, 3000
NUM_CUTS = 200  # of each file system, with `make chaos`
SHORTEST, LONGEST = 0.01, 0.3  # seconds between two cuts

Stories = list[Callable[["Disk"], None]]


def can_mount() -> str:
    """Why no file system of a test's own can be mounted here; empty if it can."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    missing = [tool for tool in ("mkfs.ext4", "mkfs.xfs", "losetup") if shutil.which(tool) is None]
    if missing or not Path("/dev/loop-control").exists():
        return f"there is no {', '.join(missing) or '/dev/loop-control'}"
    return ""


pytestmark = pytest.mark.skipif(bool(can_mount()), reason=can_mount())


@dataclass
class Disk:
    """A mounted file system, and what a user was told of the runs on it."""

    kind: str
    folder: Path
    told: dict[str, str] = field(default_factory=dict)  # the newest thing that was told of each run
    problems: list[str] = field(default_factory=list)
    num_cuts: int = 0
    states: list[str] = field(default_factory=list)  # of the runs in the copies

    @property
    def home(self) -> Path:
        return self.folder / "mount" / "home"

    def make(self) -> None:
        for name, kind, size in (("outer", "xfs", OUTER_MIB), ("mount", self.kind, DISK_MIB)):
            image = self.folder / ("outer.img" if name == "outer" else "outer/disk.img")
            with image.open("wb") as file:
                file.truncate(size << 20)
            run("mkfs." + kind, "-q", "-F" if kind == "ext4" else "-f", image)
            (self.folder / name).mkdir()
            run("mount", "-o", "loop", image, self.folder / name)
        (self.folder / "cut").mkdir()

    def release(self) -> None:
        for name in ("cut", "mount", "outer"):
            subprocess.run(["umount", "-l", self.folder / name], capture_output=True, check=False)

    def cut(self) -> None:
        """Copy the disk as it is now, and look at what it holds after its recovery."""
        copy, told = self.folder / "outer" / "copy.img", dict(self.told)  # told before, so it must be true
        run("cp", "--reflink=always", self.folder / "outer" / "disk.img", copy)
        run("mount", "-o", "loop,nouuid" if self.kind == "xfs" else "loop", copy, self.folder / "cut")
        try:
            self.num_cuts += 1
            self._inspect(self.folder / "cut" / "home", told)
        finally:
            run("umount", self.folder / "cut")
            copy.unlink()

    def _inspect(self, home: Path, told: dict[str, str]) -> None:
        runs = [RunFolder(path) for path in (home / "runs").glob("[0-9a-f]*") if path.is_dir()]
        for run_id in told.keys() - {run.run_id for run in runs}:
            self.problems.append(f"{run_id} was {told[run_id]}, and is gone")
        for found in runs:
            self.problems.extend(f"{found.run_id} {text}" for text in look(found, told.get(found.run_id, "")))
            self.states.append(str(found.state()))
        for file in [*(home / "studies").glob("*.json"), *(home / "runs").glob("*/*.json")]:
            if file.name != OUTLINE and not is_json(file):  # a cache: an empty one is read as none, and made again
                self.problems.append(f"{file.relative_to(home)} is not JSON, of {file.stat().st_size} bytes")


def look(found: RunFolder, told: str) -> Iterator[str]:
    """Yield what is lost of a run, after a power cut, of what was told of it before."""
    if told and not found.plan_file.exists():
        yield f"was {told}, and has no plan"
    if not found.plan_file.exists():
        return
    state, model = found.state(), found.path / "model"
    if told in {"finished", "pruned", "released"} and state is not State.FINISHED:
        yield f"was {told}, and is {state}"
    is_trial = b'"study"' in found.plan_file.read_bytes()  # whose workers of a moment save no model
    if (model.exists() or (state is State.FINISHED and not is_trial)) and (damage := manifest.find_damage(model)):
        yield f"is {state}, and its model is not whole: {damage}"
    for checkpoint in (found.path / "checkpoints").glob("step-*"):
        if told != "pruned" and state is not State.FINISHED and (damage := manifest.find_damage(checkpoint)):
            yield f"has a checkpoint that is not whole: {checkpoint.name}: {damage}"
    if unreadable := sum(record is None for record, _ in scan(found.path)):
        yield f"has {unreadable} lines in its journal that cannot be read"


def is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except ValueError:
        return False
    return True


def run(*words: object) -> None:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(request.param, tmp_path)
    try:
        made.make()
        monkeypatch.setenv("SPARSEBP_HOME", str(made.home))
        yield made
    finally:
        made.release()


def tell(disk: Disk, runs: list[RunFolder], text: str) -> None:
    disk.told |= {run.run_id: text for run in runs}


def list_folders(disk: Disk) -> list[RunFolder]:
    return [RunFolder(path.parent) for path in (disk.home / "runs").glob("[0-9a-f]*/plan.json")]


def study_story(study: Path) -> Callable[[Disk], None]:
    """Two arms and two learning rates, with workers of a moment."""

    def story(disk: Disk) -> None:
        before = {run.run_id for run in list_folders(disk)}
        done = FAKE_STUDY.run("study", study, *(["--again"] if before else []), cwd=study.parent)
        assert done.returncode == 0, done.stderr
        new = [run for run in list_folders(disk) if run.run_id not in before]
        assert new
        tell(disk, new, "finished")

    return story


def target_story(disk: Disk) -> None:
    """A run elsewhere: started, followed, fetched, and deleted there."""
    target = FakeTarget(disk.folder / f"there-{len(disk.told)}")  # on the disk of another machine
    made = make_run(max_steps=40)
    tell(disk, [made], "submitted")
    assert target.submit(made).wait(120) is State.FINISHED
    while (target.engine.there / made.run_id).exists():
        time.sleep(0.01)
    tell(disk, [made], "released")
    while made.is_locked("target"):  # until its last word is on the disk
        time.sleep(0.01)


def training_story(recipe: Path) -> Callable[[Disk], None]:
    """A run with the worker that trains, then the deletion of its checkpoints."""

    def story(disk: Disk) -> None:
        before = {run.run_id for run in list_folders(disk)}
        words = ["run", str(recipe), "--set", "training.max_steps=24", "--set", "checkpoint.every=6"]
        for verb, text in ((words, "finished"), (["prune"], "pruned")):
            done = subprocess.run([*COMMAND, *verb], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            tell(disk, [run for run in list_folders(disk) if run.run_id not in before], text)

    return story


def tell_under_cuts(disk: Disk, stories: Stories, num_cuts: int, seed: int) -> None:
    """Tell the stories one after the other, again and again, and cut the power in every one until it is enough."""
    chance, over = random.Random(seed), threading.Event()
    failed: list[BaseException] = []

    def tell_stories() -> None:
        try:
            while not over.is_set():
                for story in stories:
                    story(disk)
                    if over.is_set():
                        return
        except BaseException as error:
            failed.append(error)
            over.set()

    teller = threading.Thread(target=tell_stories)
    teller.start()
    try:
        while disk.num_cuts < num_cuts and not over.is_set():
            time.sleep(chance.uniform(SHORTEST, LONGEST))
            disk.cut()
    finally:
        over.set()
        teller.join()
    assert failed == []
    disk.cut()  # with everything told


@pytest.mark.promise("R27")
def test_a_power_cut_takes_nothing_of_a_run_elsewhere(disk: Disk, record_property) -> None:
    tell_under_cuts(disk, [target_story], 8, 0)
    record_property("trials", disk.num_cuts)
    assert disk.problems == []
    assert str(State.FINISHED) in disk.states


@pytest.mark.chaos
@pytest.mark.promise("R27")
@pytest.mark.timeout(3000)
def test_a_power_cut_takes_nothing_of_whole_stories(
    disk: Disk, write_study, tiny_folder: Path, tmp_path: Path, record_property
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(folder=tiny_folder))
    stories: Stories = [training_story(recipe), target_story, study_story(write_study())]
    tell_under_cuts(disk, stories, NUM_CUTS, 1)
    record_property("trials", disk.num_cuts)
    record_property("of which", ("run not finished", sum(state != "finished" for state in disk.states)))
    assert disk.problems == []
    assert len(set(disk.states)) > 1


@pytest.mark.parametrize("disk", ["xfs"], indirect=True)
def test_without_waiting_for_the_disk_a_power_cut_is_noticed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    target_story(disk)
    disk.cut()
    assert disk.problems
