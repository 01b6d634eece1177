"""Define the options of a Slurm run, and render the batch script from them. This module runs nothing.

Slurm warns the script (USR1) before a time limit or a preemption. The script forwards the warning to the worker, which
writes a checkpoint, and then requeues the job. Several runs become an array with one task each.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from sparsebp_cli.errors import UsageError
from sparsebp_cli.recipe.schema import PositiveInt
from sparsebp_cli.target.confinement import read_mount
from sparsebp_cli.target.container import ContainerOptions, MountText, Size, check_gpus
from sparsebp_cli.target.engine import LOST_CODE, MOST_RESTARTS
from sparsebp_cli.target.shell import RESET

AbsoluteFolder = Annotated[str, Field(pattern=r"^/[\w./@+-]*$")]
Word = Annotated[str, Field(pattern=r"^[\w.,:@/*+-]+$")]
JOB_NAME = "sparsebp"
# Launchers meet at a port in this range, chosen by the job's number. It lies below the system's ephemeral ports (from
# 32768).
FIRST_PORT, NUM_PORTS = 20000, 10000
OTHERS_SECONDS = 180  # for other nodes' launchers to end after the first one; longer than they need


class SlurmOptions(ContainerOptions):
    """A job of Slurm, submitted here or on a login node over SSH."""

    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9/][\w.:/@#+-]*$")] = Field(
        "sparsebp:latest", description="Image of the container: a name for pyxis, a file or URI for apptainer."
    )
    host: Annotated[str, Field(pattern=r"^ssh://([\w.-]+@)?[\w.-]+(:[0-9]+)?$")] | None = Field(
        None, description="Login node on which SparseBP runs sbatch: ssh://[USER@]HOST[:PORT]; null: this machine."
    )
    folder: AbsoluteFolder | None = Field(
        None,
        description="Folder for runs, which all nodes share. Required with host. null: $SPARSEBP_HOME.",
    )
    setup: list[str] = Field(
        default_factory=list,
        description="Shell lines that run before each command on the cluster, such as module load.",
    )
    partition: Word | None = Field(None, description="Slurm partition; null: the cluster's default.")
    account: Word | None = Field(None, description="Slurm account; null: your default account.")
    timeout_min: PositiveInt | None = Field(None, description="Time limit in minutes; null: the partition's default.")
    gpus: PositiveInt | Annotated[str, Field(pattern=r"^[\w.-]+:[1-9][0-9]*$")] | None = Field(
        None, description="GPUs of a run on each node: NUMBER, or TYPE:NUMBER such as a100:2; null: none."
    )
    cpus: PositiveInt | None = Field(None, description="CPUs of a run, on each node; null: the partition's default.")
    memory: Size | None = Field(
        None, description="Memory of a run, on each node, such as 16g; null: the partition's default."
    )
    requeue: bool = Field(True, description="true: Slurm requeues a run after preemption or its time limit.")
    warning_seconds: Annotated[int, Field(ge=10, le=3600)] = Field(
        120, description="Seconds before the time limit at which a run writes its last checkpoint."
    )
    container: Literal["none", "apptainer", "pyxis"] = Field(
        "none", description="Program that runs the image. none: no container."
    )
    mounts: list[MountText] = Field(
        default_factory=list, description="Folders to mount: SOURCE:TARGET (read-only) or SOURCE:TARGET:rw."
    )
    arguments: list[Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[^\s]*)?$")]] = Field(
        default_factory=list, description="Further options of sbatch, such as --constraint=a100."
    )

    spans_nodes: ClassVar[bool] = True

    @model_validator(mode="after")
    def _consistent(self) -> SlurmOptions:
        if self.host and not self.folder:
            raise ValueError("with 'host', also set 'folder': a folder for runs that all nodes of the cluster share")
        if self.requeue and self.timeout_min and self.timeout_min * 60 <= self.warning_seconds:
            raise ValueError(
                f"warning_seconds must be below the time limit, {self.timeout_min * 60} seconds (timeout_min: "
                f"{self.timeout_min}), got {self.warning_seconds}"
            )
        if self.nodes > 1:
            check_gpus(self, self.gpus)
        if any("\n" in line or "\r" in line for line in self.setup):
            raise ValueError("setup: each item must be one line, got an item with several lines")
        return self


def sbatch_options(options: SlurmOptions, folder: str, num_runs: int, max_parallel: int) -> list[str]:
    """Return the options of sbatch. Output before the run's own goes to ``folder``; several runs become an array."""
    number = "%A_%a" if num_runs > 1 else "%j"
    # Append, because a requeued job would otherwise truncate its output.
    words = [f"--job-name={JOB_NAME}", f"--output={folder}/slurm-{number}.out", "--open-mode=append"]
    words += [f"--nodes={options.nodes}", "--ntasks-per-node=1"] if options.nodes > 1 else ["--ntasks=1"]
    # B: Slurm warns only the script, which forwards the warning.
    words += [f"--signal=B:USR1@{options.warning_seconds}", "--requeue" if options.requeue else "--no-requeue"]
    for name, value in (
        ("partition", options.partition),
        ("account", options.account),
        ("time", options.timeout_min),
        ("gres", f"gpu:{options.gpus}" if options.gpus else None),
        ("cpus-per-task", options.cpus),
        ("mem", options.memory),
    ):
        words += [f"--{name}={value}"] if value else []
    if num_runs > 1:
        words.append(f"--array=0-{num_runs - 1}%{max_parallel}")
    return [*words, *options.arguments]


def render_script(options: SlurmOptions, runs: Sequence[str], max_parallel: int = 1, *, before: str = "") -> str:
    """Return the bash batch script of one or several runs. ``runs`` are the runs' folders as the nodes see them.
    ``before`` holds lines that create the folders if no client does."""
    top = str(PurePosixPath(runs[0]).parent)
    head = "\n".join(f"#SBATCH {_quote_option(word)}" for word in sbatch_options(options, top, len(runs), max_parallel))
    listed = "\n".join(f"  {shlex.quote(run)}" for run in runs)
    environment = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(options.env.items()))
    setup = "\n".join(_prepare(line) for line in options.setup)
    inner = "\n".join(
        part
        for part in (environment, setup, f"{RESET}{_meeting(options)}", f"exec {worker_command(options, '$run')}")
        if part
    )
    return f"""#!/bin/bash
{head}

runs=(
{listed}
){before and chr(10) + before}
run=${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}
key=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
key=${{key:-$SLURM_JOB_ID}}
worker= hit= again= idle=
{_forwarding(options)}
trap 'again=yes; forward_signal' USR1
trap 'forward_signal' TERM
exec >> "$run/worker.log" 2>&1

# One job a run: the first job creates the file, and a requeued job finds its own key in it.
if ! (set -C; echo "$key" > "$run/slurm-owner") 2>/dev/null && [ "$(cat "$run/slurm-owner")" != "$key" ]; then
  echo "job $(cat "$run/slurm-owner") works on this run already"
  exit 75
fi
rm -f "$run/slurm-exit"

# A shell of its own: what setup sets and traps is not that of this script. It becomes the worker.
run="$run" "$BASH" -c {shlex.quote(inner)} &
worker=$!
[ ! -e "$run/slurm-stop" ] || hit=yes  # Slurm loses a signal that comes before this script has started
[ -z "$hit" ] || forward_signal
wait "$worker"
code=$?
while [ -n "$hit" ]; do  # a signal ends a wait, and leaves the worker's exit code for the next one
  hit=
  wait "$worker"
  waited=$?
  [ "$waited" = 127 ] || code=$waited
done

{_reading(options)}{_counting(options)}if {_requeue_condition(options)}; then
  # Write no exit file from here on: the job is not over, and Slurm ends what still runs of it.
  trap 'exit 143' TERM
  if scontrol requeue "$key"; then sleep 60 & wait; exit 143; fi
fi
echo "$key $code${{idle:+ $idle}}" > "$run/slurm-exit"
rm -f "$run/slurm-owner"
exit "$code"
"""


def _prepare(line: str) -> str:
    """Return the line that runs a line of setup. If it fails, the run ends and the log names the line."""
    failed = shlex.quote(f"target.setup: {line!r} failed: exit code")
    # Because of ||, an earlier line's `set -e` does not end the shell before the message.
    return f"eval {shlex.quote(line)} < /dev/null || {{ code=$?; echo {failed} $code; exit 1; }}"


def _is_step(options: SlurmOptions) -> bool:
    """Return whether srun starts the worker."""
    return options.nodes > 1 or options.container == "pyxis"


def _forwarding(options: SlurmOptions) -> str:
    """Return the shell function that forwards a signal to the worker."""
    if not _is_step(options):
        return 'forward_signal() { hit=yes; [ -z "$worker" ] || kill -TERM "$worker" 2> /dev/null; }'
    # srun kills its tasks if it gets SIGTERM itself, and scancel reaches a step only once it exists.
    return """forward_signal() {
  hit=yes
  [ -n "$worker" ] || return
  until scontrol show step "$SLURM_JOB_ID.0" > /dev/null 2>&1 || ! kill -0 "$worker" 2> /dev/null; do sleep 0.5; done
  scancel --signal=TERM "$SLURM_JOB_ID"
}"""


def _meeting(options: SlurmOptions) -> str:
    """Return the lines that define where the launchers of several nodes meet: on this script's node, the first one."""
    if options.nodes == 1:
        return ""
    place = f"$(uname -n):$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"
    return f'\nrm -f "$run/slurm-code"\nexport SPARSEBP_FIRST_NODE={place} SPARSEBP_CODE_FILE="$run/slurm-code"'


def _reading(options: SlurmOptions) -> str:
    """Return the line that reads the run's exit code. The exit code of srun is the largest of all nodes."""
    if options.nodes == 1:
        return ""
    return '[ ! -e "$run/slurm-code" ] || code=$(cat "$run/slurm-code")\nrm -f "$run/slurm-code"\n'


def _counting(options: SlurmOptions) -> str:
    """Return the lines that set ``idle`` if a job was warned several times in a row without a new checkpoint. Such a
    job would be requeued for ever, because the warning comes before it can make a step. If the count cannot be read, or
    the previous job could not write it, use Slurm's count of restarts."""
    if not options.requeue:
        return ""
    return f"""if [ -n "$again" ] && [ "$code" = 143 ]; then
  newest=$(ls "$run/checkpoints" 2> /dev/null | grep '^step-' | sort | tail -n 1)
  before= times=
  if [ -e "$run/slurm-idle" ]; then
    read -r before times 2> /dev/null < "$run/slurm-idle"
    case "$times" in
      [0-9] | [0-9][0-9]) if [ "$before" = "${{newest:-none}}" ]; then times=$((times + 1)); else times=0; fi ;;
      *) times=${{SLURM_RESTART_COUNT:-0}} ;;
    esac
  fi
  echo "${{newest:-none}} ${{times:-0}}" > "$run/slurm-idle.part" && mv -T "$run/slurm-idle.part" "$run/slurm-idle"
  [ "${{times:-0}}" -lt {MOST_RESTARTS} ] || {{ idle=idle; rm -rf "$run/slurm-idle"; }}
fi
"""


def _requeue_condition(options: SlurmOptions) -> str:
    """Return the test for requeueing the job: it was warned, or it lost a node."""
    warned = '[ -n "$again" ] && [ "$code" = 143 ] && [ -z "$idle" ]'
    if options.nodes > 1:
        lost = f'[ "$code" = {LOST_CODE} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_RESTARTS} ]'
        warned = f"{{ {{ {warned}; }} || {{ {lost}; }}; }}"
    return f'{warned} && [ ! -e "$run/slurm-stop" ]' + ("" if options.requeue else " && false")


def worker_command(options: SlurmOptions, run: str) -> str:
    """Return the shell line that starts the worker on every node. ``run`` is the run's folder as a shell word."""
    worker = f'{shlex.quote(options.python)} -P -m {options.worker} "{run}/plan.json"'
    if options.container == "apptainer":
        gpus = " --nv" if options.gpus else ""
        binds = "".join(f" --bind {shlex.quote(read_mount(mount).text)}" for mount in options.mounts)
        worker = f'apptainer exec{gpus} --bind "{run}"{binds} {shlex.quote(options.image)} {worker}'
    if not _is_step(options):
        return worker
    step = "srun"
    if options.nodes > 1:
        # A failing launcher tells the others itself. Slurm would kill the first launcher before it can report why.
        step += f" --nodes={options.nodes} --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={OTHERS_SECONDS}"
        worker = f"bash -c 'SPARSEBP_NODE=$SLURM_PROCID exec \"$@\"' node {worker}"
    if options.cpus:
        step += f" --cpus-per-task={options.cpus}"  # since Slurm 22.05 srun does not inherit it
    if options.container == "pyxis":
        mounts = "".join(f",{shlex.quote(read_mount(mount).text)}" for mount in options.mounts)
        step += f' --container-image={shlex.quote(options.image)} --container-mounts="{run}:{run}"{mounts}'
    return f"{step} {worker}"


def _quote_option(word: str) -> str:
    """Return an option quoted as for a shell, in one line, as sbatch reads it from a script."""
    if not word.isprintable():
        raise UsageError(f"an option of sbatch must be one line of printable characters, got {word!r}")
    return shlex.quote(word)
