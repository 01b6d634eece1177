"""The relay on a machine, with a folder in the place of the bucket."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sparsebp_sky
from conftest import Sky
from sparsebp_sky.relay import Relay
from sparsebp_sky.task import FOLDER

from sparsebp_cli.target import RunFolder

RELAY = Path(sparsebp_sky.__file__).with_name("relay.py")
# Says which checkpoint it goes on from, makes another, and ends with the code in CODE.
WORKER = """
import os, sys
from pathlib import Path
run = Path(sys.argv[1]).parent
steps = sorted(path.name for path in (run / "checkpoints").glob("step-*")) if (run / "checkpoints").exists() else []
print("from", steps[-1] if steps else "nothing", flush=True)
step = run / "checkpoints" / f"step-{len(steps) + 1:08d}"
step.mkdir(parents=True)
(step / "weights").write_text("w" * 1000)
with (run / "journal.jsonl").open("a") as journal:
    journal.write(f'{{"step": {len(steps) + 1}}}\\n')
(run / "model").mkdir(exist_ok=True)
(run / "model" / "weights").write_text("m")
sys.exit(int(os.environ.get("CODE", "0")))
"""


class Machine:
    """A machine that the bucket is mounted on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bucket = folder, folder / "bucket" / "sparsebp-x-00000000"
        self.bucket.mkdir(parents=True)
        (folder / "work_once.py").write_text(WORKER)
        with tarfile.open(self.bucket / "start.tar", "w") as archive:
            for name, text in (("x/plan.json", "{}"), ("x/journal.jsonl", '{"sent": 1}\n')):
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))

    def run(self, number: int, job: str = "1", **environment: str) -> subprocess.CompletedProcess[str]:
        home = self.folder / f"home-{number}"
        home.mkdir()
        words = [sys.executable, str(RELAY), str(self.bucket), "x", "work_once", "0.05"]
        values = {"HOME": str(home), "PYTHONPATH": str(self.folder), "SKYPILOT_MANAGED_JOB_ID": job, **environment}
        return subprocess.run(words, env=os.environ | values, capture_output=True, text=True, check=False)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.bucket)) for path in self.bucket.rglob("*") if path.is_file()}

    def journal(self) -> str:
        return "".join(path.read_text() for path in sorted((self.bucket / "journal").iterdir()))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_a_worker_wrote_is_in_the_bucket_and_its_code_comes_last(machine: Machine) -> None:
    done = machine.run(1, CODE="7")
    assert (done.returncode, done.stdout) == (7, "from nothing\n")
    assert (machine.bucket / "state").read_text() == "over 7"
    assert machine.journal() == '{"step": 1}\n', "what was sent is not sent back"
    assert machine.names() == {
        "start.tar",
        "owner",
        "state",
        "journal/000000000000012",
        "log/000000000000000",
        "whole/step-00000001.tar",
        "whole/rest.tar",
    }
    with tarfile.open(machine.bucket / "whole" / "rest.tar") as archive:
        assert archive.getnames() == ["model", "model/weights"]


def test_the_next_machine_goes_on_from_the_newest_whole_checkpoint(machine: Machine) -> None:
    machine.run(1)
    (machine.bucket / "state").write_text("working")  # the machine went before it was over
    whole = (machine.bucket / "whole" / "step-00000001.tar").read_bytes()
    (machine.bucket / "whole" / "step-00000009.tar").write_bytes(whole[:700])
    done = machine.run(2)
    assert (done.returncode, done.stdout) == (0, "from step-00000001\n")
    assert "step-00000009.tar cannot be read" in done.stderr
    assert machine.journal() == '{"step": 1}\n{"step": 2}\n'
    assert sorted(path.name for path in (machine.bucket / "journal").iterdir()) == [
        "000000000000012",
        "000000000000024",
    ]


def test_a_job_that_is_begun_again_after_the_end_does_not_work_again(machine: Machine) -> None:
    machine.run(1, CODE="3")
    done = machine.run(2)
    assert (done.returncode, done.stdout) == (3, "")


def test_a_run_that_another_job_has_taken_is_left_alone(machine: Machine) -> None:
    (machine.bucket / "owner").write_text("7")
    done = machine.run(1, job="8")
    assert (done.returncode, done.stdout) == (75, "")
    assert "managed job 7 works on run x already" in done.stderr
    assert machine.names() == {"start.tar", "owner"}


def test_a_job_is_known_by_the_number_in_its_tasks_name_where_that_is_all(machine: Machine) -> None:
    machine.run(1, job="", SKYPILOT_TASK_ID="sky-managed-2026-01-01-00-00-00-000000_sparsebp-x_12-0")
    assert (machine.bucket / "owner").read_text() == "12"


def test_a_bucket_that_fails_for_a_moment_loses_nothing(machine: Machine) -> None:
    # The journal's place is a file for a while, so that nothing can be put below it.
    (machine.bucket / "journal").touch()
    line = f"import threading; threading.Timer(1.5, os.unlink, ['{machine.bucket}/journal']).start()\ntime.sleep(1)\n"
    (machine.folder / "work_once.py").write_text("import time\n" + WORKER.replace("sys.exit", line + "sys.exit"))
    done = machine.run(1)
    assert done.returncode == 0
    assert "cannot write to the bucket, trying again" in done.stderr
    assert machine.journal() == '{"step": 1}\n'


def test_an_old_checkpoint_goes_once_a_newer_one_is_there(machine: Machine) -> None:
    machine.run(1)
    (machine.bucket / "state").write_text("working")
    line = "import shutil; shutil.rmtree(run / 'checkpoints' / 'step-00000001')\nsys.exit"
    (machine.folder / "work_once.py").write_text(WORKER.replace("sys.exit", line))
    machine.run(2)
    assert sorted(path.name for path in (machine.bucket / "whole").iterdir()) == ["rest.tar", "step-00000002.tar"]


def test_an_archive_that_leads_out_of_the_machines_folder_is_not_unpacked(machine: Machine) -> None:
    with tarfile.open(machine.bucket / "start.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../../escaped"), io.BytesIO(b""))
    done = machine.run(1)
    assert done.returncode != 0
    assert "OutsideDestinationError" in done.stderr
    assert list(machine.folder.rglob("escaped")) == []


def lines(begin: int, end: int, machine: int) -> bytes:
    return b"".join(b'{"step": %d, "machine": %d}\n' % (step, machine) for step in range(begin, end))


@pytest.mark.parametrize("cut", [0, 1, 40, 83, 139, 140, 195])
def test_a_machine_lost_while_it_writes_the_event_log_costs_no_line_and_tears_none(
    sky: Sky, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cut: int
) -> None:
    """The client has read the log in between, and the next machine writes other lines than the lost one did."""
    bucket = sky.bucket / FOLDER / "sparsebp-x-00000000"
    bucket.mkdir(parents=True)
    engine, client = sky.engine(), RunFolder(tmp_path / "client")
    client.path.mkdir()
    with tarfile.open(bucket / "start.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x/plan.json"), io.BytesIO(b""))
    journals = []
    for number in (1, 2, 3):
        monkeypatch.setenv("HOME", str(tmp_path / f"home-{number}"))
        (tmp_path / f"home-{number}").mkdir()
        relay = Relay(bucket, "x", "none", 0.1)
        relay.restore()
        journal = tmp_path / f"home-{number}" / ".sparsebp-x-00000000" / "runs" / "x" / "journal.jsonl"
        begun = journal.read_bytes()
        assert begun.startswith(client.journal_file.read_bytes() if number > 1 else b"")
        for end in (2, 3, 5):
            journal.write_bytes(begun + lines(0, end, number) + b'{"st')
            relay.put_lines("journal", journal)
            engine.pull(client, bucket.name)
            assert client.journal_file.read_bytes() == begun + lines(0, end, number)
        put = Relay.put

        def break_off(self: Relay, name: str, data: bytes, put: Callable[..., None] = put) -> None:
            put(self, name, data[:cut])
            raise KeyboardInterrupt

        journal.write_bytes(begun + lines(0, 8, number))
        with monkeypatch.context() as lost:
            lost.setattr(Relay, "put", break_off)
            with pytest.raises(KeyboardInterrupt):
                relay.put_lines("journal", journal)
        engine.pull(client, bucket.name)
        journals.append(client.journal_file.read_bytes())
    machines = [json.loads(line)["machine"] for line in journals[-1].splitlines()]
    assert machines == sorted(machines)
    assert len(machines) >= 3 * 5
    assert journals[2].startswith(journals[1])
    assert journals[1].startswith(journals[0])
