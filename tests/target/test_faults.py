"""Faults of connections and engines, played by executables that stand in for docker, ssh and Slurm."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunFailedError, UnreachableError, UsageError
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.target.batch import SlurmOptions
from sparsebp_cli.target.container import DockerOptions
from sparsebp_cli.target.docker import DockerEngine
from sparsebp_cli.target.engine import Phase
from sparsebp_cli.target.slurm import SlurmEngine

from .conftest import last_end, make_run

Play = Callable[..., None]

# Plays what is written in files named after the verb; notes every call.
PLAYER = """\
#!/bin/sh
echo "$0 $*" >> "$PLAYS/calls"
case "$1" in --host|--context) shift 2;; esac
verb=${0##*/}
[ "$verb" != docker ] || verb=$1
[ "$verb" != container ] || verb=inspect
[ -e "$PLAYS/$verb.sleep" ] && sleep "$(cat "$PLAYS/$verb.sleep")"
cat "$PLAYS/$verb.out" 2>/dev/null
cat "$PLAYS/$verb.err" >&2 2>/dev/null
exit "$(cat "$PLAYS/$verb.code" 2>/dev/null || echo 0)"
"""
CUT = (
    "error during connect: Get http://docker.example.com/v1.41/info: command [ssh -l me -- gpu1 docker system "
    "dial-stdio] has exited with exit status 255, please make sure the URL is valid: stderr=Connection closed"
)
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
HANDLE = "sparsebp-x ENGINE"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    plays = tmp_path / "plays"
    plays.mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("docker", "ssh", "squeue", "sacct", "sbatch", "scancel"):
        (tmp_path / "bin" / name).write_text(PLAYER)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PLAYS", str(plays))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def write(verb: str, out: str | bytes = "", err: str = "", code: int = 0, sleep: float = 0.0) -> None:
        (plays / f"{verb}.out").write_bytes(out.encode() if isinstance(out, str) else out)
        (plays / f"{verb}.err").write_text(err)
        (plays / f"{verb}.code").write_text(str(code))
        if sleep:
            (plays / f"{verb}.sleep").write_text(str(sleep))

    return write


@pytest.fixture
def run(play: Play) -> RunFolder:
    return make_run()


@pytest.fixture
def docker() -> DockerEngine:
    return DockerEngine(DockerOptions(host="ssh://gpu1"))


@pytest.fixture
def slurm() -> SlurmEngine:
    return SlurmEngine(SlurmOptions(host="ssh://login", folder="/scratch/me"))


@pytest.mark.parametrize("problem", [CUT, DOWN, "unexpected EOF", "context deadline exceeded", ""])
@pytest.mark.promise("R10")
def test_docker_that_does_not_get_through_is_unreachable(
    play: Play, run: RunFolder, docker: DockerEngine, problem: str
) -> None:
    for verb in ("version", "inspect", "kill", "rm", "exec", "cp", "image", "info"):
        play(verb, err=problem, code=1)
    for call in (
        lambda: docker.find(run),
        lambda: docker.status(run, HANDLE),
        lambda: docker.pull(run, HANDLE),
        lambda: docker.signal(run, HANDLE, 15),
        lambda: docker.fetch(run, HANDLE),
        lambda: docker.release(run, HANDLE),
        lambda: docker.start([run], 1),
    ):
        with pytest.raises(UnreachableError):
            call()
    assert [finding.level for finding in docker.check()] == ["fail"] or not problem


def test_what_ssh_said_is_what_is_told(play: Play, run: RunFolder, docker: DockerEngine) -> None:
    play("inspect", err=CUT, code=1)
    with pytest.raises(UnreachableError, match=r"^ssh://gpu1 cannot be reached: Connection closed$"):
        docker.status(run, HANDLE)


def test_a_slow_line_is_unreachable_and_not_waited_for(
    play: Play, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.tool.Tool.timeout_seconds", 0.3)
    play("inspect", sleep=30)
    engine = DockerEngine(DockerOptions(host="ssh://gpu1"))
    object.__setattr__(engine._tool, "timeout_seconds", 0.3)
    with pytest.raises(UnreachableError, match=r"longer than 0.3 s"):
        engine.status(run, HANDLE)


@pytest.mark.parametrize(
    ("state", "code", "text"),
    [
        ('{"Status": "exited", "ExitCode": 137, "OOMKilled": false, "Error": ""}', -9, ""),
        ('{"Status": "exited", "ExitCode": 137, "OOMKilled": true, "Error": ""}', -9, "memory ran out"),
        ('{"Status": "exited", "ExitCode": 143, "OOMKilled": false, "Error": ""}', 143, ""),
        ('{"Status": "dead", "ExitCode": 2, "OOMKilled": false, "Error": "no such device"}', 2, "no such device"),
        ('{"Status": "exited", "ExitCode": 0, "OOMKilled": false, "Error": ""}', 0, ""),
    ],
)
def test_how_a_container_ended_is_read(
    play: Play, run: RunFolder, docker: DockerEngine, state: str, code: int, text: str
) -> None:
    play("inspect", state)
    status = docker.status(run, HANDLE)
    assert (status.phase, status.exit_code) == (Phase.OVER, code)
    assert text in status.text


def test_a_container_that_is_gone_is_over_only_on_the_engine_that_it_was_on(
    play: Play, run: RunFolder, docker: DockerEngine
) -> None:
    play("inspect", err="Error: No such container: sparsebp-x", code=1)
    play("info", "ENGINE\n")
    status = docker.status(run, HANDLE)
    assert (status.phase, status.gone) == (Phase.OVER, True)
    play("info", "ANOTHER\n")
    with pytest.raises(UnreachableError, match="not the Docker engine on which"):
        docker.status(run, HANDLE)


def test_an_error_of_the_engine_itself_says_nothing_of_the_run(
    play: Play, run: RunFolder, docker: DockerEngine
) -> None:
    play("inspect", err="Error response from daemon: layer does not exist", code=1)
    with pytest.raises(UnreachableError, match="layer does not exist"):
        docker.status(run, HANDLE)


def make_archive(run: RunFolder, **files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{run.run_id}/{name.replace('__', '/')}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.mark.promise("R10")
def test_a_half_written_archive_changes_nothing(play: Play, run: RunFolder, docker: DockerEngine) -> None:
    whole = make_archive(run, model__weights="w" * 5000, checkpoints__a="1")
    before = sorted(path.name for path in run.path.iterdir())
    for part in (whole[:512], whole[:3000], whole[: 512 + 5120], whole[: len(whole) - 10240 + 512], b""):
        play("cp", part)
        with pytest.raises(UnreachableError):
            docker.fetch(run, HANDLE)
        assert [name for name in sorted(p.name for p in run.path.iterdir()) if not name.startswith(".")] == before
    play("cp", whole, err="unexpected EOF", code=1)
    with pytest.raises(UnreachableError, match="broke off"):
        docker.fetch(run, HANDLE)
    assert not (run.path / "model").exists()
    play("cp", whole)
    docker.fetch(run, HANDLE)
    assert (run.path / "model" / "weights").read_text() == "w" * 5000


@pytest.mark.parametrize("name", ["../../escape", "/tmp/escape"])
@pytest.mark.promise("R12")
def test_an_archive_that_leads_out_is_refused(
    play: Play, run: RunFolder, docker: DockerEngine, name: str, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(f"{run.run_id}/{name}" if name.startswith("..") else f"../..{name}"))
    play("cp", buffer.getvalue())
    with pytest.raises(RunFailedError, match="dangerous"):
        docker.fetch(run, HANDLE)
    assert not list(run.path.parent.parent.rglob("escape"))


@pytest.mark.promise("R12")
def test_links_and_private_files_of_an_archive_are_not_taken(
    play: Play, run: RunFolder, docker: DockerEngine, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo(f"{run.run_id}/model")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
        for name in ("target.json", "cancelled", "plan.json", "target.lock", "notes.txt"):
            archive.addfile(tarfile.TarInfo(f"{run.run_id}/{name}"))
    play("cp", buffer.getvalue())
    plan = run.plan_file.read_bytes()
    docker.fetch(run, HANDLE)
    assert sorted(path.name for path in run.path.iterdir()) == ["notes.txt", "plan.json"]
    assert run.plan_file.read_bytes() == plan


def test_a_log_that_was_cut_at_its_beginning_doubles_nothing(play: Play, run: RunFolder, docker: DockerEngine) -> None:
    def lines(first: int, last: int) -> str:
        return "".join(f"2026-01-01T00:00:{n:02d}.000000001Z line {n}\n" for n in range(first, last))

    for first, last in ((1, 6), (4, 8), (4, 8), (20, 22)):
        play("logs", lines(first, last))
        docker.pull(run, HANDLE)
    assert run.log_file.read_text().splitlines() == [f"line {n}" for n in (*range(1, 8), 20, 21)]


def test_a_journal_arrives_in_whole_lines_only(play: Play, run: RunFolder, docker: DockerEngine) -> None:
    play("exec", '{"kind": "note"}\n{"kind": "no')
    docker.pull(run, HANDLE)
    assert (run.path / "journal.jsonl").read_text() == '{"kind": "note"}\n'


@pytest.mark.parametrize(
    "problem", ["ssh: connect to host login port 22: Connection refused", "Host key verification failed.", ""]
)
@pytest.mark.promise("R10")
def test_ssh_that_ends_with_255_is_unreachable(play: Play, run: RunFolder, slurm: SlurmEngine, problem: str) -> None:
    play("ssh", err=problem, code=255)
    for call in (
        lambda: slurm.find(run),
        lambda: slurm.start([run], 1),
        lambda: slurm.status(run, "7"),
        lambda: slurm.pull(run, "7"),
        lambda: slurm.signal(run, "7", 15),
        lambda: slurm.fetch(run, "7"),
        lambda: slurm.release(run, "7"),
    ):
        with pytest.raises(UnreachableError, match=problem or "255"):
            call()
    assert [finding.level for finding in slurm.check()] == ["fail"]


def test_a_controller_that_does_not_answer_is_unreachable(play: Play, run: RunFolder) -> None:
    play("squeue", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1)
    with pytest.raises(UnreachableError, match="does not answer"):
        SlurmEngine(SlurmOptions()).status(run, "7")


UNKNOWN = {"err": "slurm_load_jobs error: Invalid job id specified", "code": 1}


@pytest.mark.parametrize(
    ("squeue", "sacct", "exit_file", "phase", "code", "text"),
    [
        ({"out": "PENDING\n"}, {}, "", Phase.WAITING, None, ""),
        ({"out": "REQUEUE_HOLD\n"}, {}, "7 143", Phase.WAITING, None, ""),
        ({"out": "RUNNING\n"}, {}, "", Phase.WORKING, None, ""),
        ({"out": "COMPLETING\n"}, {}, "7 0", Phase.WORKING, None, ""),
        ({"out": "COMPLETED\n"}, {}, "7 0", Phase.OVER, 0, ""),
        ({"out": "FAILED\n"}, {}, "7 2", Phase.OVER, 2, ""),
        ({"out": "FAILED\n"}, {}, "7 137", Phase.OVER, -9, ""),
        ({"out": "FAILED\n"}, {}, "6 0", Phase.OVER, None, "without a reason"),
        ({"out": "NODE_FAIL\n"}, {}, "", Phase.OVER, None, "the node of the job failed"),
        ({"out": "TIMEOUT\n"}, {}, "", Phase.OVER, None, "time limit"),
        (UNKNOWN, {"err": "Slurm accounting storage is disabled", "code": 1}, "7 0", Phase.OVER, 0, ""),
        (UNKNOWN, {"err": "Slurm accounting storage is disabled", "code": 1}, "", Phase.OVER, None, "without a reason"),
        (UNKNOWN, {"out": "OUT_OF_MEMORY\n"}, "", Phase.OVER, None, "memory ran out"),
        (UNKNOWN, {"out": "CANCELLED by 1000\n"}, "", Phase.OVER, None, "cancelled in Slurm"),
    ],
)
def test_the_state_of_a_job_is_read_with_and_without_a_database(
    play: Play,
    squeue: dict[str, object],
    sacct: dict[str, object],
    exit_file: str,
    phase: Phase,
    code: int | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.slurm.DOUBT_SECONDS", 0.0)
    play("squeue", **squeue)
    play("sacct", **sacct)
    run = make_run()
    if exit_file:
        (run.path / "slurm-exit").write_text(exit_file + "\n")
    status = SlurmEngine(SlurmOptions()).status(run, "7")
    assert (status.phase, status.exit_code) == (phase, code)
    assert text in status.text


def test_what_sbatch_refuses_is_told_and_can_be_tried_again(play: Play, run: RunFolder) -> None:
    play("sbatch", err="sbatch: error: invalid partition specified: gpus", code=1)
    engine = SlurmEngine(SlurmOptions(partition="gpus"))
    for _ in range(2):
        with pytest.raises(RunFailedError, match="invalid partition specified: gpus"):
            engine.start([run], 1)
    assert not (run.path / "slurm-submit").exists()


def test_a_program_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="docker cannot be run here"):
        DockerEngine(DockerOptions()).find(make_run())


def test_a_run_with_dangerous_results_has_failed_and_they_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.target.fake import FakeTarget

    fake = FakeTarget(tmp_path / "there")

    def refuse(*_: object) -> None:
        raise RunFailedError("what the run left holds something dangerous")

    monkeypatch.setattr(fake.engine, "fetch", refuse)
    run = make_run("fail")
    job = fake.submit(run)
    assert job.wait(60) is State.FAILED
    assert "dangerous" in str(last_end(run)["text"])
    assert fake.engine.find(run) is not None
