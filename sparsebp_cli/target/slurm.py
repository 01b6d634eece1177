"""The target ``slurm``: submit each run as a batch job by ``sbatch``, ``squeue``, ``scancel`` and optional ``sacct``.

A run's folder on the cluster has additional files: ``slurm-job`` (the job's id), ``slurm-owner`` (the job that works on
it now), ``slurm-exit`` (that job's exit code) and ``slurm-stop`` (do not requeue). During submission it has
``slurm-submit`` (the submitting remote runner and its script).
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.budget import size_of
from sparsebp_cli.run.folder import is_shared
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.archive import MOST_BYTES, append_lines, merge_into_run, pack, receive
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.confinement import check_remote_mounts, mount_query, read_mount
from sparsebp_cli.target.container import check_paths, list_paths
from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.engine import MOST_RESTARTS, Phase, TargetEngine, WorkerStatus, read_exit_code
from sparsebp_cli.target.probe import SOURCE, compare_environment
from sparsebp_cli.target.remote import RemoteTarget
from sparsebp_cli.target.shell import SetupError, Shell, shell_command
from sparsebp_cli.target.tool import CommandResult

# Job states of squeue. In any other state the job is at work.
WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD",
}  # fmt: skip
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
NO_ANSWER = re.compile(
    r"unable to contact slurm|connection (refused|timed out)|socket timed out|communication connection failure"
    r"|transport endpoint|resource temporarily unavailable|unable to establish configuration source|munge",
    re.IGNORECASE,
)
REASONS = {
    "BOOT_FAIL": "the node did not boot",
    "CANCELLED": "cancelled in Slurm",
    "DEADLINE": "the deadline of the job was reached",
    "NODE_FAIL": "the node of the job failed",
    "OUT_OF_MEMORY": "killed because memory ran out: see target.memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "the time limit of the job was reached: see target.timeout_min",
}
IDLE = (
    f"{MOST_RESTARTS + 1} times in a row, Slurm's time limit came before a new checkpoint, so the job is not requeued: "
    "raise the limit (target.timeout_min), or lower target.warning_seconds"
)
# Exit codes of the shell lines: another remote runner has the run; sbatch may still be at work; its answer has no
# number.
BUSY, ASKING, ODD = 76, 77, 78
IGNORED = ("SBATCH_", "SQUEUE_", "SCANCEL_")  # variables that change commands; the plan holds what a run requests
ASKING_MINUTES = 10  # after which an sbatch without an answer has certainly ended
DOUBT_SECONDS = 5.0  # a requeued job briefly looks ended


# Prints the number of the run's job, or nothing. If the answer of sbatch was lost, this is the job submitted with the
# script of `slurm-submit/asked`, or the job that has begun or ended since then.
FINDING = """[ ! -s slurm-job ] || { cat slurm-job; exit; }
[ -e slurm-submit/asked ] || exit 0
read -r number where < slurm-submit/asked
queue=$(squeue --noheader --array --user="$(id -un)" --format='%i %o') || exit 1
job=$(printf '%s\\n' "$queue" | while read -r id command; do
  [ "$command" = "$where" ] || continue
  case $number/$id in -/*_*) ;; -/*) echo "$id" ;; *_"$number") echo "$id" ;; esac
done | tail -n 1)
[ -n "$job" ] || job=$(cat slurm-owner 2> /dev/null)
[ -n "$job" ] || { [ ! -e slurm-exit ] || read -r job rest < slurm-exit; }
[ -n "$job" ] || exit 0
echo "$job" > slurm-job.part && mv slurm-job.part slurm-job && rm -rf slurm-submit && echo "$job"
"""


@final
class SlurmEngine(TargetEngine):
    """A Slurm cluster, through its commands here or on its login node."""

    fastest_seconds: ClassVar[float] = 0.5
    slowest_seconds: ClassVar[float] = 15.0  # many users share a controller
    has_queue = True

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        self._place = options.host or "Slurm"
        self._shell = Shell(options.host, "Slurm", options.setup, ignored=IGNORED)
        self._token = secrets.token_hex(6)
        self._ended: dict[str, float] = {}

    def command(self, run: RunFolder) -> list[str]:
        line = f"sbatch --parsable {shlex.quote(self._folder(run) + '/job.sh')}"
        return shell_command(self._options.host, line) if self._options.host else shlex.split(line)

    def files(self, run: RunFolder) -> dict[str, str]:
        return {f"{self._folder(run)}/job.sh": render_script(self._options, [self._folder(run)])}

    def check_plan(self, plan: Plan) -> None:
        if self._options.container != "none":
            check_paths(plan, [read_mount(mount).target for mount in self._options.mounts])

    def find(self, run: RunFolder) -> str | None:
        answer = self._run_shell(f"cd {self._quoted_folder(run)} 2>/dev/null || exit 0\n{FINDING}")
        if answer.code != 0:
            raise UnreachableError(f"{self._place} did not say whether the run is there: {answer.problem}")
        handle = answer.text
        if handle and not self.is_handle(handle):
            raise UnreachableError(
                f"{self._place}: {self._folder(run)}/slurm-job must contain a job id, got {shorten(handle)!r}"
            )
        return handle or None

    def is_handle(self, text: str) -> bool:
        return re.fullmatch(r"[0-9]+(_[0-9]+)?", text) is not None

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        self._check_remote_mounts()
        self._check_remote_paths(runs)
        try:
            for run in runs:
                self._claim(run)
                if self._options.host:
                    self._send(run)
        except RunFailedError:  # such as a full disk: the runs can be submitted once there is space
            self._release_claims(runs)
            raise
        script = render_script(self._options, [self._folder(run) for run in runs], max_parallel)
        where = f"{self._quoted_folder(runs[0])}/job.sh"
        # An earlier job's slurm-stop would stop the new job, and its count of warnings would end it too early.
        names = ("slurm-stop", "slurm-idle")
        stale = " ".join(f"{self._quoted_folder(run)}/{name}" for run in runs for name in names)
        claims = [f"{self._quoted_folder(run)}/slurm-submit" for run in runs]
        lines = [f"rm -rf {stale}; cat > {where} || exit 1"]
        # Written before sbatch runs: if its answer is lost, `find` looks for the job of this script.
        numbers = [str(number) for number in range(len(runs))] if len(runs) > 1 else ["-"]
        lines += [f"echo {n} {where} > {claim}/asked || exit 1" for n, claim in zip(numbers, claims, strict=True)]
        lines += [f"said=$(sbatch --parsable {where})", "code=$?"]
        lines += [f"touch {' '.join(f'{claim}/answered' for claim in claims)}", '[ "$code" = 0 ] || exit 1']
        # --parsable appends the cluster's name after a semicolon; a wrapper of the site may print more.
        lines.append("job=$(printf '%s\\n' \"$said\" | sed -n 's/^\\([0-9][0-9]*\\)\\(;.*\\)*$/\\1/p' | tail -n 1)")
        lines.append(f'[ -n "$job" ] || {{ printf \'%s\\n\' "$said"; exit {ODD}; }}')
        for number, run in enumerate(runs):
            key = f'"${{job}}_{number}"' if len(runs) > 1 else '"$job"'
            place = self._quoted_folder(run)
            # Atomically, because this number identifies the job later.
            lines.append(f"echo {key} > {place}/slurm-job.part && mv {place}/slurm-job.part {place}/slurm-job")
            lines.append(f"rm -rf {place}/slurm-submit")
        answer = self._run_shell("\n".join([*lines, 'echo "$job"']), given=script.encode())
        if answer.code not in {0, ODD}:
            # Look before releasing the claims, which `find` needs: an sbatch that failed may have submitted the job.
            found = [self.find(run) for run in runs]
            if handles := [handle for handle in found if handle is not None]:
                if len(handles) == len(runs):
                    return handles
                raise UnreachableError(f"{self._place} accepted only some of the runs: {answer.problem}")
            self._release_claims(runs)
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")
        job = (answer.text.splitlines() or [""])[-1]
        if answer.code == ODD or not self.is_handle(job):
            raise UnreachableError(f"{self._place}: sbatch must print a job id, got {shorten(job)!r}")
        return [f"{job}_{number}" if len(runs) > 1 else job for number in range(len(runs))]

    def status(self, run: RunFolder, handle: str) -> WorkerStatus:
        query = f"squeue --noheader --states=all --jobs={handle} --format=%T 2>&1"
        answer = self._run_shell(
            # After squeue: a job that left the queue has already written its exit code.
            f"{query}; printf '\\n==\\n'; cat {self._quoted_folder(run)}/slurm-exit 2>/dev/null || true"
        )
        states, _, ended = answer.text.partition("==")
        state = states.strip().splitlines()[-1] if states.strip() else ""
        if state in WAITING:
            return WorkerStatus(Phase.WAITING)
        if re.fullmatch(r"[A-Z_]+", state) and state not in ENDED:
            return WorkerStatus(Phase.WORKING)
        key, code, idle = [*(ended.strip().splitlines() or [""])[-1].split(), "", "", ""][:3]
        if key == handle and re.fullmatch("[0-9]{1,3}", code):
            return WorkerStatus(Phase.OVER, read_exit_code(int(code)), IDLE if idle else "")
        if state not in ENDED:
            state = self._state_from_accounting(handle)
        if state in WAITING:
            return WorkerStatus(Phase.WAITING)
        since = self._ended.setdefault(handle, time.monotonic())
        if time.monotonic() - since < DOUBT_SECONDS:
            return WorkerStatus(Phase.WORKING)
        return WorkerStatus(Phase.OVER, None, f"Slurm: {REASONS.get(state, f'job {handle} ended without a reason')}")

    def pull(self, run: RunFolder, handle: str) -> None:
        if self._options.host is None:
            return  # client and nodes share the run's folder
        for file in (run.path / JOURNAL, run.log_file):
            place = f"{self._quoted_folder(run)}/{file.name}"
            tail = self._run_shell(f"tail -c +{size_of(file) + 1} {place} 2>/dev/null | head -c {MOST_BYTES}")
            append_lines(file, tail.out)

    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        # TERM goes only to the script, which forwards it and waits; KILL to everything that the job runs.
        kill = f"scancel --full --signal=KILL {handle}" if number == 9 else f"scancel --batch --signal=TERM {handle}"
        self._run_shell(
            # Write slurm-stop first, because the job may be requeued right now. A waiting job gets no signal; cancel
            # it.
            f"touch {self._quoted_folder(run)}/slurm-stop\n"
            f"case $(squeue --noheader --jobs={handle} --format=%T) in RUNNING) {kill};; *) scancel {handle};; esac"
        )

    def fetch(self, run: RunFolder, handle: str) -> None:
        if self._options.host is None:
            return
        self.pull(run, handle)
        lines = f"tar -C {self._quoted_folder(run)}/.. -cf - -- {shlex.quote(run.run_id)}"
        with self._shell.read(lines) as stream:
            part = receive(stream, run)
        merge_into_run(part, run.run_id, run)

    def release(self, run: RunFolder, handle: str) -> None:
        place = self._quoted_folder(run)
        self._run_shell(f"rm -f {place}/../slurm-{handle}.out")
        if self._options.host is None:
            left = ("slurm-job", "slurm-owner", "slurm-exit", "slurm-stop", "slurm-idle", "job.sh")
            self._run_shell(f"rm -rf {' '.join(f'{place}/{name}' for name in left)}")
        else:
            self._run_shell(f"rm -rf {place}")

    def check(self) -> Iterator[CheckResult]:
        options = self._options
        try:
            version = self._run_shell("sinfo --version")
            if version.code != 0:
                yield CheckResult("fail", "reachable", f"{self._place} has no working Slurm: {version.problem}")
                return
            nodes = self._run_shell(f"sinfo --noheader --format='%P %a %D %G'{_partition_option(options.partition)}")
            yield CheckResult("ok", "reachable", f"{version.text} on {self._place}")
            yield from self._shell.check()
            partitions = ", ".join(" ".join(line.split()) for line in nodes.text.splitlines())
            missing = f"there is no {options.partition}" if options.partition else "there are none"
            missing = missing if nodes.code == 0 else nodes.problem
            yield CheckResult("ok" if partitions else "fail", "partitions", partitions or missing)
            accounting = self._run_shell("sacct --noheader --starttime=now")
            yield CheckResult("ok", "accounting", "sacct works" if accounting.code == 0 else "none; it is not needed")
            if options.container == "none":
                folder = shlex.quote(options.folder or "/")
                python = f"mkdir -p {folder} && {shlex.quote(options.python)} -P -c {shlex.quote(SOURCE)} {folder}"
                found = self._run_shell(python)
                if found.code == 0:
                    yield from compare_environment(found.text, num_gpus=0)
                else:
                    hint = "check target.python, and the lines of target.setup that load it"
                    yield CheckResult("fail", "python", f"{options.python} does not work there: {found.problem}", hint)
            if partitions:
                yield self._check_job()
        except SetupError as error:
            yield CheckResult("fail", "setup", str(error))
        except UnreachableError as error:
            yield CheckResult("fail", "reachable", str(error))

    def _check_job(self) -> CheckResult:
        """Return Slurm's verdict on the job's options (GPUs, memory, account, limits), without submitting a job."""
        script = render_script(self._options, ["/tmp/run"])
        judged = self._run_shell("sbatch --test-only", given=script.encode())
        if judged.code != 0:
            return CheckResult("fail", "job", f"Slurm would refuse it: {judged.problem}")
        return CheckResult("ok", "job", "Slurm would accept it")

    def _folder(self, run: RunFolder) -> str:
        folder = self._options.folder
        return f"{folder.rstrip('/')}/runs/{run.run_id}" if folder and self._options.host else str(run.path)

    def _quoted_folder(self, run: RunFolder) -> str:
        return shlex.quote(self._folder(run))

    def _run_shell(self, lines: str, *, given: bytes = b"") -> CommandResult:
        answer = self._shell.run(lines, given=given)
        if NO_ANSWER.search(answer.err) or (answer.code == 0 and NO_ANSWER.search(answer.text)):
            raise UnreachableError(f"{self._place}: the controller of Slurm does not answer: {answer.problem}")
        return answer

    def _check_remote_mounts(self) -> None:
        """Check how the mounts resolve on the login node."""
        mounts = self._options.mounts
        if not mounts or self._options.host is None:
            return  # on this machine the options were already checked
        try:
            check_remote_mounts(mounts, self._run_shell(mount_query(mounts)).text)
        except ValueError as error:
            raise UsageError(f"target.mounts on {self._place}: {error}") from None

    def _check_remote_paths(self, runs: Sequence[RunFolder]) -> None:
        """Check that data and models are on the login node, whose disks the nodes share. Otherwise the job would fail
        when it starts, maybe hours later."""
        if self._options.host is None or self._options.container != "none":
            return
        wanted = {path: key for run in runs for key, path in list_paths(Plan.load(run.plan_file)).items()}
        for path, key in wanted.items():
            answer = self._run_shell(f"[ -e {shlex.quote(path)} ]")
            if answer.code == 1:
                raise UsageError(f"{key}: {path} is not on {self._place}: copy it to the same path there")

    def _claim(self, run: RunFolder) -> None:
        """Keep other remote runners from submitting the same run. A claim older than ten minutes belongs to a dead one.
        An ``sbatch`` that it left running may still submit the run, but ends within ten minutes too."""
        place = self._quoted_folder(run)
        # Only one mkdir succeeds, on shared disks too.
        answer = self._run_shell(
            f"{'' if is_shared() else 'umask 077; '}mkdir -p {place} && cd {place} || exit 1\n"
            f"[ ! -e slurm-job ] || exit {BUSY}\n"
            f"if ! mkdir slurm-submit 2>/dev/null && [ ! -e slurm-submit/{self._token} ]; then\n"
            f'  [ -n "$(find slurm-submit -maxdepth 0 -mmin +10)" ] || exit {BUSY}\n'
            "fi\n"
            f"asked=$(find slurm-submit/asked -mmin -{ASKING_MINUTES} 2>/dev/null)\n"
            f'[ -z "$asked" ] || [ -e slurm-submit/answered ] || exit {ASKING}\n'
            # Remove an earlier job's files; from here on these files belong to the new job.
            "rm -rf slurm-owner slurm-exit slurm-submit/asked slurm-submit/answered\n"
            f"touch slurm-submit/{self._token}"
        )
        if answer.code == ASKING:
            raise UnreachableError(
                f"{self._place}: an earlier sbatch for run {run.run_id} has not answered; if no job of this run "
                f"appears within {ASKING_MINUTES} minutes, SparseBP submits the run again"
            )
        if answer.code == BUSY:
            raise RunBusyError(
                f"run {run.run_id} was already started on {self._place}, by another command: wait until it ends"
            )
        if answer.code != 0:
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")

    def _release_claims(self, runs: Sequence[RunFolder]) -> None:
        """Remove only this remote runner's claims."""
        for run in runs:
            claim = f"{self._quoted_folder(run)}/slurm-submit"
            self._run_shell(f"[ ! -e {claim}/{self._token} ] || rm -rf {claim}")

    def _send(self, run: RunFolder) -> None:
        lines = f"tar -C {self._quoted_folder(run)}/.. -xf - --no-same-owner"
        # Send the log too: its size here decides what is fetched later (see KubernetesEngine).
        answer = self._shell.write(lines, lambda stream: pack(stream, run, run.run_id, more=("worker.log",)))
        if answer.code != 0:
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")

    def _state_from_accounting(self, handle: str) -> str:
        """Return the state of a job that the controller has forgotten; empty if there is no accounting."""
        answer = self._run_shell(
            f"sacct --noheader --parsable2 --allocations --jobs={handle} --format=State 2>/dev/null || true"
        )
        return answer.text.splitlines()[0].split()[0] if answer.text else ""


@final
class SlurmTarget(RemoteTarget):
    """A job of Slurm."""

    options_class: ClassVar[type[TargetOptions]] = SlurmOptions
    engine_class = SlurmEngine


def _partition_option(partition: str | None) -> str:
    return f" --partition={shlex.quote(partition)}" if partition else ""
