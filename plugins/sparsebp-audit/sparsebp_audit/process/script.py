"""Audit the training in the current process, and write the report to a folder.

Environment variables configure it, so that the command's child processes inherit them: ``SPARSEBP_AUDIT_FOLDER`` and
``SPARSEBP_AUDIT`` (JSON: ``steps``, ``threshold``, ``stop``, ``apply``, ``examples``). It writes
``report-RANK-PID.json``, atomically, after the last audited step or when the process ends, with ``apply`` both;
``script-RANK-PID``, the path of the training script; ``steps-RANK-PID``, the number of steps so far; and ``idle-PID``
in a process that imported torch and ran no backward pass.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_post_hook

from sparsebp_audit.auditor import Audit
from sparsebp_audit.auditor.application import Application
from sparsebp_audit.report import AuditReport
from sparsebp_cli.run import durable

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


class ScriptAudit:
    """The audit of this process; ``settings`` has the keys ``steps``, ``threshold``, ``stop``, ``apply`` and
    ``examples``."""

    rank: int

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._stops = folder, bool(settings["stop"])
        self._pid, self._is_written = os.getpid(), False
        self.rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), 0)
        self._application: Application | None = None
        self._report: AuditReport | None = None
        self._audit = Audit(
            steps=settings["steps"],
            threshold=settings["threshold"],
            examples=settings["examples"],
            on_step=self._tell,
            on_end=self._end,
        )
        if settings["apply"]:
            self._application = Application(self._audit.session, self._say, self._finish)

    def start(self) -> None:
        """Start auditing; the report is written at the latest when the process ends."""
        if self._application is not None:  # first, so that it does not count the last watched step
            application = self._application
            register_optimizer_step_post_hook(lambda optimizer, *_: application.after_step(optimizer))
        self._audit.start()
        self._thread, self._leave = threading.get_ident(), os._exit
        os._exit = self._exit  # type: ignore[assignment] # os._exit skips atexit handlers, which write the report
        # A Python signal handler runs only between bytecodes. In a group of processes, one that hangs in a kernel would
        # not end on SIGTERM, and its launcher would wait for it; so only a single process gets a handler.
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1" and threading.current_thread() is threading.main_thread()
        self._has_handler = is_alone and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._has_handler:
            signal.signal(signal.SIGTERM, self._terminate)
        atexit.register(self.write)

    def write(self) -> None:
        """Write the report once. A process forked from this one writes nothing."""
        if self._is_written or os.getpid() != self._pid:
            return
        self._let_go()
        try:
            self._audit.stop()
            if self._audit.has_seen_backward:
                self._save_report()
            else:
                self._save(f"idle-{self._pid}", "")
        except Exception:  # an error in the audit must not end the training
            self._save(f"failed-{self._pid}", traceback.format_exc())

    def _save_report(self) -> None:
        if self._report is None:  # once: packing changes what a report says about the model
            self._report = self._audit.report()
        if self._application is not None:
            self._report = replace(self._report, applied=self._application.result())
            if self._is_written:
                self._application.stop()
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is not None:  # `python -c` has no script
            self._save(f"script-{self.rank}-{self._pid}", str(Path(script).absolute()))
        self._save(f"report-{self.rank}-{self._pid}.json", json.dumps(self._report.to_dict()))

    def _let_go(self) -> None:
        self._is_written, os._exit = True, self._leave
        # The script may have set its own handler since.
        if self._has_handler and signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _exit(self, code: int) -> NoReturn:
        if threading.get_ident() == self._thread:
            self.write()
        self._leave(code)

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        self.write()
        # End by the signal itself, so that a waiting process sees the usual exit status.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _tell(self, step: int, steps: int) -> None:
        self._save(f"steps-{self.rank}-{self._pid}", str(step))
        self._say(f"step {step} of {steps}")

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(f"sparsebp audit: {line}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        # Do not call Audit.stop: it would remove the optimizer's hooks while one of them runs.
        if self._application is None:
            self._let_go()
        try:
            self._save_report()
            if self._application is not None:
                self._application.start()
        except Exception:
            self._save(f"failed-{self._pid}", traceback.format_exc())
        if self._stops and self._application is None:
            sys.exit(0)

    def _finish(self) -> None:
        """End the command with ``stop``, when all applied changes are measured."""
        if self._stops:
            self.write()
            sys.exit(0)

    def _save(self, name: str, text: str) -> None:
        try:
            durable.write_file(self._folder / name, text)
        except OSError as error:  # the auditing command may have ended and removed the folder
            print(f"sparsebp audit: the report was not written: {error}", file=sys.stderr)


def begin_watching() -> None:
    """Audit this process as configured by the environment variables."""
    settings = json.loads(os.environ["SPARSEBP_AUDIT"])
    ScriptAudit(Path(os.environ["SPARSEBP_AUDIT_FOLDER"]), settings).start()
