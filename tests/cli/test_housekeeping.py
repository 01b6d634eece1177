"""``rm`` and ``prune`` delete what nobody needs, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from sparsebp_cli.cli.app import Crash
from sparsebp_cli.cli.housekeeping import rm
from sparsebp_cli.run import RunFolder, home, list_runs, manifest
from sparsebp_cli.run.folder import DELETED

from .conftest import Cli, Write, write_run


def add_checkpoints(run: RunFolder, *, with_model: bool = True) -> None:
    for step in (2, 3):
        folder = run.path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "state.bin").write_bytes(bytes(1000))
        manifest.write_manifest(folder)
    if with_model:
        (run.path / "model").mkdir()
        (run.path / "model" / "weights.bin").write_bytes(bytes(500))
        manifest.write_manifest(run.path / "model")


def write_interrupted(recipe: Path) -> RunFolder:
    run = write_run(recipe)
    lines = (run.path / "journal.jsonl").read_text().splitlines(keepends=True)
    (run.path / "journal.jsonl").write_text("".join(line for line in lines if '"end"' not in line))
    add_checkpoints(run, with_model=False)
    return run


def test_prune_deletes_checkpoints_of_finished_runs_alone(call: Cli, write_recipe: Write) -> None:
    run, other = write_run(write_recipe()), write_interrupted(write_recipe(name="other"))
    add_checkpoints(run)
    files = [file for file in run.path.rglob("*") if file.is_file() and "checkpoints" not in file.parts]
    before = {file: file.read_bytes() for file in files}
    assert "2.23 kB would be freed" in call("prune", "--dry-run").stdout
    assert len(list((run.path / "checkpoints").iterdir())) == 2
    done = call("prune")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2.23 kB freed")
    assert f"{run.run_id} fake: 2.23 kB" in done.stdout
    assert list((run.path / "checkpoints").iterdir()) == []
    assert {file: file.read_bytes() for file in before} == before
    assert len(list((other.path / "checkpoints").iterdir())) == 2
    assert call("prune").stdout == "0 B freed\n"


def test_the_newest_checkpoint_of_a_finished_run_without_a_model_stays(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    add_checkpoints(run, with_model=False)
    assert "1.11 kB freed" in call("prune", run.run_id).stdout
    assert [place.name for place in (run.path / "checkpoints").iterdir()] == ["step-00000003"]


def test_prune_refuses_a_run_that_is_named_and_not_finished(call: Cli, write_recipe: Write) -> None:
    run = write_interrupted(write_recipe())
    done = call("prune", run.run_id)
    assert done.returncode == 2
    assert done.stderr == f"error: run {run.run_id} is interrupted: only checkpoints of finished runs can be deleted\n"
    assert len(list((run.path / "checkpoints").iterdir())) == 2


def test_rm_deletes_the_runs_that_are_named_and_no_other(call: Cli, write_recipe: Write) -> None:
    run, interrupted = write_run(write_recipe()), write_interrupted(write_recipe(name="other"))
    left = write_run(write_recipe(name="left"))
    done = call("rm", run.run_id, interrupted.run_id, "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 runs deleted, ")
    assert [folder.run_id for folder in list_runs()] == [left.run_id]
    assert [path.name for path in (home() / "runs").iterdir()] == [left.run_id]


@pytest.mark.parametrize("is_closed", [False, True])
def test_rm_asks_and_deletes_nothing_where_nobody_answers(
    call: Cli, write_recipe: Write, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    run = write_run(write_recipe())
    if is_closed:
        monkeypatch.setattr(sys, "stdin", None)
    done = call("rm", run.run_id)
    assert done.returncode == 2
    told = "cannot ask for confirmation without a terminal: add --yes to delete; nothing was deleted"
    assert done.stderr == f"error: {told}\n"
    assert run.path.is_dir()


@pytest.mark.parametrize("role", ["worker", "target"])
def test_rm_refuses_a_run_that_lives_before_it_deletes_any(call: Cli, write_recipe: Write, role: str) -> None:
    over, alive = write_run(write_recipe()), write_interrupted(write_recipe(name="alive"))
    with alive.lock(role):
        done = call("rm", over.run_id, alive.run_id, "--yes")
    assert done.returncode == 101
    assert "nothing was deleted" in done.stderr
    assert over.path.is_dir()
    assert alive.path.is_dir()


def test_a_deletion_that_was_killed_is_finished_by_the_next(call: Cli, write_recipe: Write) -> None:
    gone, run = write_run(write_recipe()), write_run(write_recipe(name="second"))
    left = gone.path.rename(gone.path.with_name(f"{DELETED}{gone.run_id}"))
    assert [folder.run_id for folder in list_runs()] == [run.run_id]
    call("rm", run.run_id, "--yes")
    assert not left.exists()


def test_a_damaged_run_is_deleted_like_any_other(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    run.plan_file.write_text("{")
    (run.path / "tracking.json").write_text(json.dumps({"uri": "sqlite:////nowhere", "mlflow_run_id": "a"}))
    assert call("rm", run.run_id, "--yes").returncode == 0
    assert not run.path.exists()


def test_a_finished_run_of_a_removed_target_is_shown_compared_and_deleted(call: Cli, write_recipe: Write) -> None:
    over, begun = write_run(write_recipe()), write_interrupted(write_recipe(name="begun"))
    for run in (over, begun):
        plan = json.loads(run.plan_file.read_text())
        plan["recipe"]["target"]["kind"] = "sky"
        run.plan_file.write_text(json.dumps(plan))
    (begun.path / "target.json").write_text("{")  # nobody knows whether it still trains
    for words in (("show", over.run_id), ("compare", over.run_id), ("rm", over.run_id, "--yes")):
        assert call(*words).returncode == 0
    assert not over.path.exists()
    refused = call("rm", begun.run_id, "--yes")
    assert refused.returncode == 2
    assert "`sky` was removed after 0.5" in refused.stderr
    assert begun.path.exists()


def test_a_store_that_does_not_answer_keeps_its_record_and_says_so(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe(), "tracking.uri=sqlite:////nowhere/at/all.db")
    (run.path / "tracking.json").write_text(json.dumps({"uri": "http://other", "mlflow_run_id": "a"}))
    done = call("rm", run.run_id, "--yes")
    assert done.returncode == 0
    told = "its record in MLflow was not deleted: this record is in http://other, but the run's store is now sqlite:"
    assert told in done.stderr
    assert not run.path.exists()


@pytest.mark.promise("R27")
@pytest.mark.parametrize("damage", ["emptied", "one bit", "no manifest"])
def test_prune_keeps_a_whole_checkpoint_beside_a_damaged_model(call: Cli, write_recipe: Write, damage: str) -> None:
    run = write_run(write_recipe())
    add_checkpoints(run)
    file = run.path / "model" / ("manifest.json" if damage == "no manifest" else "weights.bin")
    if damage == "no manifest":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "emptied" else b"\1" + bytes(499))
    done = call("prune")
    assert [place.name for place in (run.path / "checkpoints").iterdir()] == ["step-00000003"]
    assert "its model cannot be verified" in done.stderr
    (run.path / "checkpoints" / "step-00000003" / "state.bin").write_bytes(b"")
    assert "its checkpoints are kept" in call("prune").stderr
    assert len(list((run.path / "checkpoints").iterdir())) == 1


def test_rm_deletes_where_runs_are_on_another_file_system(call: Cli, write_recipe: Write, tmp_path: Path) -> None:
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        home().mkdir()
        (home() / "runs").symlink_to(other)
        run, linked = write_run(write_recipe()), write_run(write_recipe(name="linked"))
        shutil.move(linked.path, tmp_path / "far")
        linked.path.symlink_to(tmp_path / "far")
        done = call("rm", run.run_id, linked.run_id, "-y")
        assert (done.returncode, done.stderr) == (0, "")
        assert [*other.iterdir()] == []
        assert not (tmp_path / "far").exists()
    finally:
        shutil.rmtree(other)


def test_rm_of_a_link_to_another_run_leaves_that_run(call: Cli, write_recipe: Write) -> None:
    run, other = write_run(write_recipe()), write_run(write_recipe(name="other"))
    (home() / "runs" / "alias").symlink_to(run.path)
    done = call("rm", "alias", other.run_id, "-y", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [freed["bytes"] > 0 for freed in json.loads(done.stdout)["runs"]] == [False, True]
    assert [folder.name for folder in (home() / "runs").iterdir()] == [run.run_id]
    assert run.plan_file.is_file()


def test_eight_rm_at_once_delete_all(write_recipe: Write) -> None:
    runs = [write_run(write_recipe(name=f"n{number}")) for number in range(16)]
    words = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", "rm", "-y"]
    started = [
        subprocess.Popen([*words, *(run.run_id for run in runs[2 * n : 2 * n + 2])], stderr=subprocess.PIPE)
        for n in range(8)
    ]
    errors = [process.communicate()[1].decode() for process in started]
    assert errors == [""] * 8
    assert [*(home() / "runs").iterdir()] == []


def test_a_deletion_that_somebody_else_ends_while_it_is_locked_is_done(
    write_recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, run = write_run(write_recipe()), write_run(write_recipe(name="second"))
    left = gone.path.rename(gone.path.with_name(f"{DELETED}{gone.run_id}"))

    def vanish(self: Path) -> bool:
        """Answer as for a folder that was there when it was to be made, and is gone when Python looks."""
        if self == left:
            shutil.rmtree(left)
        return self.exists() and stat.S_ISDIR(self.stat().st_mode)

    monkeypatch.setattr(Path, "is_dir", vanish)
    rm([run.run_id], yes=True)
    assert [*(home() / "runs").iterdir()] == []


def test_a_run_that_is_deleted_while_it_gets_a_label_is_told_in_a_line(
    call: Cli, write_recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, link = write_run(write_recipe()), os.link

    def vanish(source: str, place: Path, **options: int) -> None:  # the last call of a write, which names the file
        if run.path.exists():
            shutil.rmtree(run.path)
        link(source, place, **options)

    monkeypatch.setattr(os, "link", vanish)
    done = call("tag", run.run_id, "mine")
    assert (done.returncode, done.stderr) == (102, f"error: run {run.run_id} was deleted meanwhile\n")
    assert not (home() / "error.log").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_rm_makes_room_where_no_file_can_be_made(call: Cli, write_recipe: Write) -> None:
    home().mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=60", "none", home()], check=True)
    try:
        run = write_run(write_recipe())
        with suppress(OSError):
            for number in range(100):
                (home() / str(number)).touch()
        done = call("rm", run.run_id, "-y")
        assert (done.returncode, done.stderr) == (0, "")
        assert not run.path.exists()
    finally:
        subprocess.run(["umount", home()], check=True)


def test_a_report_and_a_list_of_ids_survive_a_write_that_fails(call: Cli, write_recipe: Write, tmp_path: Path) -> None:
    write_run(write_recipe())
    page = tmp_path / "keep.html"
    page.write_text("before")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); import signal; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from sparsebp_cli.cli.app import main; main()"
    )
    words = [sys.executable, "-c", code, "compare", "@1", "--html", str(page)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, page.read_text()) == (100, "before")
    assert done.stderr.splitlines()[-1].endswith("the file would exceed the limit of this shell: raise `ulimit -f`")
    assert [path.name for path in tmp_path.glob(".part-*")] == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOLCK, errno.EXDEV])
def test_what_the_system_refuses_is_one_sentence_with_a_way_out(number: int) -> None:
    text = Crash().describe(OSError(number, os.strerror(number), "/home/me/.part-plan.json.1-2"))
    assert text.startswith("/home/me: ")
    assert "Errno" not in text
    assert "traceback" not in text
