"""Run the worker on a machine that SkyPilot started, and maintain the bucket's copy of the run's folder.

    python relay.py BUCKET_FOLDER RUN_ID WORKER_MODULE SYNC_SECONDS

The task contains this text, so it needs only Python 3.11.4. The worker writes to the machine's own disk. The relay puts
whole objects into the bucket and closes each before the next. It never writes an object of the event log again: it puts
the longer one beside it first, because the machine may be lost in the middle. So after a loss at any moment, the next
machine can continue: the event log reaches at least as far as every checkpoint beside it, and as the client's copy.

    start.tar             the run's folder as sent
    request               TERM: the worker must stop after a checkpoint
    owner                 the managed job that works on the run
    journal/N, log/N      whole lines of the event log and of the output, from byte N on; every second one is called Nb
    whole/NAME.tar        a checkpoint; at the end also the rest of the folder
    state                 "working", or "over" and the worker's exit code
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

LINES = {"journal": "journal.jsonl", "log": "worker.log"}
CHECKPOINT = re.compile(r"step-[0-9]+")
PART_BYTES = 1 << 20  # the event log's last part is replaced as it grows, up to this size
PLACE = 15  # digits of N
APPEAR_SECONDS = 120.0  # time for a bucket to show what was put there before the job began
LAST_PAUSES = (1.0, 5.0, 30.0, 60.0)  # between attempts to write the end of a run
FOREIGN = 75  # exit code if another job works on the run
REST = "rest"
# Files of the run's folder that are sent separately, or belong only to this machine.
APART = {"plan.json", "checkpoints", *LINES.values()}


class Relay:
    """Supervise one worker."""

    def __init__(self, bucket: Path, run_id: str, worker: str, seconds: float) -> None:
        self._bucket, self._run_id, self._seconds = bucket, run_id, seconds
        self._home = Path.home() / f".{bucket.name}"
        self._run = self._home / "runs" / run_id
        self._command = [sys.executable, "-P", "-m", worker, str(self._run / "plan.json")]
        # Versions that do not provide the job's number have it in the task's: ..._NAME_NUMBER-TASK.
        task = os.environ.get("SKYPILOT_TASK_ID", "").rpartition("_")[2].partition("-")[0]
        self._job = os.environ.get("SKYPILOT_MANAGED_JOB_ID") or task or "0"
        self._process: subprocess.Popen[bytes] | None = None
        self._signal = 0  # signal that this process got: the machine ends, not the run
        self._requested = False
        self._parts = dict.fromkeys(LINES, (0, 0))  # begin and end of the last part of each
        self._objects = dict.fromkeys(LINES, "")  # name of the last part's object, empty before there is one

    def run(self) -> int:
        """Claim the run, restore its folder, run the worker; return the exit code of the job."""
        signal.signal(signal.SIGTERM, self._note_signal)
        if not self._wait_for(self._bucket / "start.tar"):
            print(f"there is no {self._bucket / 'start.tar'}: is the bucket mounted there?", file=sys.stderr)
            return 1
        if not self._take():
            print(f"managed job {self._read('owner')} works on run {self._run_id} already", file=sys.stderr)
            return FOREIGN
        state, _, code = self._read("state").partition(" ")
        if state == "over":  # this job was started again after its worker had ended
            return self._job_code(int(code))
        self.restore()
        self.put("state", b"working")
        code_of_worker = self._work()
        self._sync_last()
        # Losing the machine does not end the run: the job continues elsewhere, unless a stop was requested.
        if self._requested or not self._signal:
            self.put("state", f"over {code_of_worker}".encode())
        return self._job_code(code_of_worker)

    def _job_code(self, code: int) -> int:
        """Return the job's exit code: the worker's, but 0 after a requested stop."""
        return 0 if self._requested and code in {130, 143} else code

    def _take(self) -> bool:
        """Return whether this job may work on the run: a bucket has no locks, but its last writer wins."""
        owner = self._read("owner")
        if not owner:
            self.put("owner", self._job.encode())
            time.sleep(self._seconds)
            owner = self._read("owner")
        return owner == self._job

    def restore(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        (self._home / "runs").mkdir(parents=True)
        with tarfile.open(self._bucket / "start.tar") as archive:
            archive.extractall(self._home / "runs", filter="data")
        for name, file in LINES.items():
            size = self._append_parts(name, self._run / file)
            self._parts[name] = (size, size)
        for path in self._list("whole"):
            if not CHECKPOINT.fullmatch(path.stem):
                continue
            try:
                with tarfile.open(path) as archive:
                    archive.extractall(self._run / "checkpoints", filter="data")
            except (tarfile.TarError, OSError, EOFError) as error:  # then an older one is used
                print(f"{path.name} cannot be read: {error}", file=sys.stderr)
                shutil.rmtree(self._run / "checkpoints" / path.stem, ignore_errors=True)

    def _append_parts(self, name: str, file: Path) -> int:
        """Append the bucket's event log or output, and return the number of bytes now present."""
        size = file.stat().st_size if file.exists() else 0
        with file.open("ab") as stream:
            for path in sorted(self._list(name)):  # a part beside the one that it replaces, then the next part
                data = path.read_bytes()
                data = data[: data.rfind(b"\n") + 1]  # a machine that was lost may have left a part of a line
                begin = int(path.name[:PLACE])
                if begin <= size < begin + len(data):
                    stream.write(data[size - begin :])
                    size = begin + len(data)
        return size

    def _work(self) -> int:
        environment = os.environ | {"SPARSEBP_HOME": str(self._home), "PYTHONUNBUFFERED": ""}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, env=environment, stdout=pipe, stderr=subprocess.STDOUT)
        if self._signal:  # the signal may have come before the process existed
            self._process.send_signal(self._signal)
        reader = threading.Thread(target=self._copy_output)
        reader.start()
        while True:
            try:
                code = self._process.wait(self._seconds)
                break
            except subprocess.TimeoutExpired:
                with suppress(OSError):  # the bucket does not answer: the next turn asks again
                    self._obey()
                    self._sync()
        reader.join()
        return 128 - code if code < 0 else code

    def _copy_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with (self._run / LINES["log"]).open("ab", buffering=0) as log:
            for line in self._process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)  # for `sky jobs logs`
                sys.stdout.buffer.flush()

    def _obey(self) -> None:
        assert self._process is not None
        if not self._requested and self._read("request") == "TERM":
            self._requested = True
            self._process.send_signal(signal.SIGTERM)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)

    def _sync(self) -> None:
        """Put new data into the bucket. Report a failure of the bucket, and try again at the next call."""
        try:
            # List checkpoints before reading the event log, so the log reaches as far as each of them.
            steps = self._list_checkpoints()
            for name, file in LINES.items():
                self.put_lines(name, self._run / file)
            self._put_checkpoints(steps)
        except OSError as error:
            print(f"cannot write to the bucket, trying again: {error}", file=sys.stderr, flush=True)
            raise

    def _sync_last(self) -> None:
        """Put everything into the bucket, with several attempts: what is missing there is lost with the machine."""
        for pause in (*LAST_PAUSES, None):
            try:
                self._sync()
                self._put_rest()
                return
            except OSError:
                if pause is None:
                    raise
            time.sleep(pause)

    def put_lines(self, name: str, file: Path) -> None:
        begin, end = self._parts[name]
        if not file.exists() or file.stat().st_size <= end:
            return
        with file.open("rb") as stream:
            stream.seek(begin)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        if begin + len(whole) > end:
            shorter, plain = self._objects[name], f"{begin:0{PLACE}d}"
            longer = f"{plain}b" if shorter == plain else plain
            self.put(f"{name}/{longer}", whole)
            self._objects[name] = longer
            if shorter in {plain, f"{plain}b"}:
                (self._bucket / name / shorter).unlink(missing_ok=True)
            end = begin + len(whole)
        # The next call begins a new part if this one is large, and otherwise replaces this one.
        self._parts[name] = (end, end) if len(whole) >= PART_BYTES else (begin, end)

    def _list_checkpoints(self) -> list[str]:
        folder = self._run / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(filter(CHECKPOINT.fullmatch, names), key=lambda name: (len(name), name))

    def _put_checkpoints(self, steps: list[str]) -> None:
        there = {path.stem for path in self._list("whole")}
        for step in steps:
            if step not in there:
                self._put_tar(step, self._run / "checkpoints", [step])
        # Last, so that at every moment there is a checkpoint from which the run can continue.
        for step in there - set(self._list_checkpoints()):
            if steps and CHECKPOINT.fullmatch(step):
                (self._bucket / "whole" / f"{step}.tar").unlink(missing_ok=True)

    def _put_rest(self) -> None:
        names = sorted(path.name for path in self._run.iterdir())
        kept = [name for name in names if name not in APART and not name.startswith(".") and not name.endswith(".lock")]
        self._put_tar(REST, self._run, kept)

    def _put_tar(self, name: str, folder: Path, members: list[str]) -> None:
        """Put files as one object; pack it on disk first, because the bucket takes one uninterrupted stream."""
        packed = self._home / "packed.tar"
        try:
            with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as archive:
                for member in members:
                    archive.add(folder / member, member)
        except FileNotFoundError:  # the worker removed this checkpoint meanwhile
            return
        place = self._bucket / "whole" / f"{name}.tar"
        place.parent.mkdir(parents=True, exist_ok=True)
        with packed.open("rb") as source, place.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.unlink()

    def put(self, name: str, data: bytes) -> None:
        place = self._bucket / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    def _read(self, name: str) -> str:
        try:
            return (self._bucket / name).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return ""

    def _list(self, name: str) -> list[Path]:
        folder = self._bucket / name
        return sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name)) if folder.is_dir() else []

    def _wait_for(self, path: Path) -> bool:
        deadline = time.monotonic() + APPEAR_SECONDS
        while not path.exists():
            if self._signal or time.monotonic() > deadline:
                return False
            time.sleep(min(1.0, self._seconds))
        return True


if __name__ == "__main__":
    sys.exit(Relay(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])).run())
