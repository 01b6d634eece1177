"""The target ``slurm``: a batch job for each run, through ``sbatch``, ``squeue``, ``scancel``; ``sacct`` is not needed.

Beside a run's own files, its folder on the cluster holds ``slurm-job`` (which job it is), ``slurm-owner`` (which job
works on it now), ``slurm-exit`` (how that ended) and ``slurm-stop`` (it is not to be put back into the queue).
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import final

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError, UsageError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.folder import is_shared
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.archive import append_lines, pack, receive, size_of, take_in
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.confinement import check_there, question
from sparsebp_cli.target.contract import Finding
from sparsebp_cli.target.engine import Engine, Phase, Sight
from sparsebp_cli.target.probe import SOURCE, compare
from sparsebp_cli.target.remote import RemoteTarget
from sparsebp_cli.target.shell import make_tool, shell_words
from sparsebp_cli.target.slurm_word import ENDED, REASONS, SILENT, WAITING, read_code
from sparsebp_cli.target.tool import Answer

BUSY = 76
DOUBT_SECONDS = 5.0  # a job that is being put back into the queue looks ended for a moment


@final
class SlurmEngine(Engine):
    """A cluster with Slurm, asked here or on its login node."""

    fastest_seconds = 0.5
    slowest_seconds = 15.0  # a controller is shared by many
    has_queue = True

    def __init__(self, options: SlurmOptions) -> None:
        """Take the options; nothing is run yet.

        Args:
            options: Of the target.
        """
        self._options = options
        self._place = options.host or "Slurm"
        self._tool = make_tool(options.host, "Slurm")
        self._token = secrets.token_hex(6)
        self._ended: dict[str, float] = {}

    def command(self, run: RunFolder) -> list[str]:
        line = f"sbatch --parsable {shlex.quote(self._folder(run) + '/job.sh')}"
        return shell_words(self._options.host, line) if self._options.host else shlex.split(line)

    def files(self, run: RunFolder) -> dict[str, str]:
        return {f"{self._folder(run)}/job.sh": render_script(self._options, [self._folder(run)])}

    def find(self, run: RunFolder) -> str | None:
        return self._sh(f"cat {self._q(run)}/slurm-job 2>/dev/null || true").text or None

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        self._check_mounts_there()
        try:
            for run in runs:
                self._claim(run)
                if self._options.host:
                    self._send(run)
        except RunFailedError:  # such as a full disk: whoever made room may submit at once
            self._give_up(runs)
            raise
        script = render_script(self._options, [self._folder(run) for run in runs], max_parallel)
        where = f"{self._q(runs[0])}/job.sh"
        stale = " ".join(f"{self._q(run)}/slurm-stop" for run in runs)  # or the new job would obey it
        lines = [f"rm -f {stale}; cat > {where} && job=$(sbatch --parsable {where}) || exit 1", "job=${job%%;*}"]
        for number, run in enumerate(runs):
            key = f'"${{job}}_{number}"' if len(runs) > 1 else '"$job"'
            place = self._q(run)
            lines.append(f"echo {key} > {place}/slurm-job.part && mv {place}/slurm-job.part {place}/slurm-job")
            lines.append(f"rm -rf {place}/slurm-submit {place}/slurm-exit")
        answer = self._sh("\n".join([*lines, 'echo "$job"']), given=script.encode())
        if answer.code != 0 or not answer.text:
            self._give_up(runs)
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")
        job = answer.text.splitlines()[-1]
        return [f"{job}_{number}" if len(runs) > 1 else job for number in range(len(runs))]

    def look(self, run: RunFolder, handle: str) -> Sight:
        ask = f"squeue --noheader --states=all --jobs={handle} --format=%T 2>&1"
        answer = self._sh(f"{ask}; printf '\\n==\\n'; cat {self._q(run)}/slurm-exit 2>/dev/null || true")
        states, _, ended = answer.text.partition("==")
        state = states.strip().splitlines()[-1] if states.strip() else ""
        if state in WAITING:
            return Sight(Phase.WAITING)
        if re.fullmatch(r"[A-Z_]+", state) and state not in ENDED:
            return Sight(Phase.WORKING)
        key, _, code = (ended.strip().splitlines() or [""])[-1].partition(" ")
        if key == handle and code.isdecimal():
            return Sight(Phase.OVER, read_code(int(code)))
        if state not in ENDED:
            state = self._ask_accounting(handle)
        if state in WAITING:
            return Sight(Phase.WAITING)
        since = self._ended.setdefault(handle, time.monotonic())
        if time.monotonic() - since < DOUBT_SECONDS:
            return Sight(Phase.WORKING)
        return Sight(Phase.OVER, None, f"Slurm: {REASONS.get(state, f'job {handle} ended without a word')}")

    def pull(self, run: RunFolder, handle: str) -> None:
        if self._options.host is None:
            return  # the run's folder is the very same
        for file in (run.path / JOURNAL, run.log_file):
            tail = self._sh(f"tail -c +{size_of(file) + 1} {self._q(run)}/{file.name} 2>/dev/null || true")
            append_lines(file, tail.out)

    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        kill = f"scancel --full --signal=KILL {handle}" if number == 9 else f"scancel --batch --signal=TERM {handle}"
        self._sh(
            f"touch {self._q(run)}/slurm-stop\n"
            f"case $(squeue --noheader --jobs={handle} --format=%T) in RUNNING) {kill};; *) scancel {handle};; esac"
        )

    def fetch(self, run: RunFolder, handle: str) -> None:
        if self._options.host is None:
            return
        self.pull(run, handle)
        lines = f"tar -C {self._q(run)}/.. -cf - -- {shlex.quote(run.run_id)}"
        with self._tool.read(shell_words(self._options.host, lines)) as stream:
            part = receive(stream, run)
        take_in(part, run.run_id, run)

    def release(self, run: RunFolder, handle: str) -> None:
        place = self._q(run)
        self._sh(f"rm -f {place}/../slurm-{handle}.out")
        if self._options.host is None:
            self._sh(
                f"rm -rf {place}/slurm-job {place}/slurm-owner {place}/slurm-exit {place}/slurm-stop {place}/job.sh"
            )
        else:
            self._sh(f"rm -rf {place}")

    def check(self) -> Iterator[Finding]:
        options = self._options
        try:
            version = self._sh("sinfo --version")
            nodes = self._sh(f"sinfo --noheader --format='%P %a %D %G'{_choose(options.partition)}")
            yield Finding("ok", "reachable", f"{version.text} on {self._place}")
            partitions = ", ".join(" ".join(line.split()) for line in nodes.text.splitlines())
            yield Finding(
                "ok" if partitions else "fail", "partitions", partitions or f"there is no {options.partition}"
            )
            accounting = self._sh("sacct --noheader --starttime=now")
            yield Finding("ok", "accounting", "sacct works" if accounting.code == 0 else "none; it is not needed")
            if options.container == "none":
                folder = shlex.quote(options.folder or "/")
                python = f"mkdir -p {folder} && {shlex.quote(options.python)} -P -c {shlex.quote(SOURCE)} {folder}"
                yield from compare(self._sh(python).text, wants_gpus=False)
        except UnreachableError as error:
            yield Finding("fail", "reachable", str(error))

    def _folder(self, run: RunFolder) -> str:
        folder = self._options.folder
        return f"{folder.rstrip('/')}/runs/{run.run_id}" if folder and self._options.host else str(run.path)

    def _q(self, run: RunFolder) -> str:
        return shlex.quote(self._folder(run))

    def _sh(self, lines: str, *, given: bytes = b"") -> Answer:
        setup = "\n".join(self._options.setup)
        answer = self._tool.run(shell_words(self._options.host, f"{setup}\n{lines}"), given=given)
        if SILENT.search(answer.err) or (answer.code == 0 and SILENT.search(answer.text)):
            raise UnreachableError(f"{self._place}: the controller of Slurm does not answer: {answer.problem}")
        return answer

    def _check_mounts_there(self) -> None:
        """Judge the mounts by how they resolve on the login node."""
        mounts = self._options.mounts
        if not mounts or self._options.host is None:
            return  # on this machine the options were judged already
        try:
            check_there(mounts, self._sh(question(mounts)).text)
        except ValueError as error:
            raise UsageError(f"target.mounts on {self._place}: {error}") from None

    def _claim(self, run: RunFolder) -> None:
        """Keep other dispatchers from submitting the same run; one that began ten minutes ago has died."""
        place = self._q(run)
        answer = self._sh(
            f"{'' if is_shared() else 'umask 077; '}mkdir -p {place} && cd {place} || exit 1\n"
            f"[ ! -e slurm-job ] || exit {BUSY}\n"
            f"if ! mkdir slurm-submit 2>/dev/null && [ ! -e slurm-submit/{self._token} ]; then\n"
            f'  [ -n "$(find slurm-submit -maxdepth 0 -mmin +10)" ] || exit {BUSY}\n'
            "fi\n"
            f"rm -f slurm-owner; touch slurm-submit/{self._token}"
        )
        if answer.code == BUSY:
            raise RunBusyError(f"run {run.run_id} is on {self._place} already, submitted by another dispatcher")
        if answer.code != 0:
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")

    def _give_up(self, runs: Sequence[RunFolder]) -> None:
        """Let others submit what this dispatcher has claimed, and nobody else."""
        for run in runs:
            claim = f"{self._q(run)}/slurm-submit"
            self._sh(f"[ ! -e {claim}/{self._token} ] || rm -rf {claim}")

    def _send(self, run: RunFolder) -> None:
        lines = f"tar -C {self._q(run)}/.. -xf - --no-same-owner"
        answer = self._tool.write(
            shell_words(self._options.host, lines), lambda stream: pack(stream, run, run.run_id, more=("worker.log",))
        )
        if answer.code != 0:
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")

    def _ask_accounting(self, handle: str) -> str:
        """Return the state of a job that the controller has forgotten; empty where there is no accounting."""
        answer = self._sh(
            f"sacct --noheader --parsable2 --allocations --jobs={handle} --format=State 2>/dev/null || true"
        )
        return answer.text.splitlines()[0].split()[0] if answer.text else ""


@final
class SlurmTarget(RemoteTarget):
    """A job of Slurm."""

    options_class = SlurmOptions

    def __init__(self, options: SlurmOptions | None = None) -> None:
        """Choose where.

        Args:
            options: The recipe's; None: the defaults.
        """
        self.engine = SlurmEngine(options or SlurmOptions())


def _choose(partition: str | None) -> str:
    return f" --partition={shlex.quote(partition)}" if partition else ""
