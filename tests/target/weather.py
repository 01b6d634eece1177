"""Engines behind their command lines, and a proxy before each that makes them slow, late, cut, doubled or wrong.

The proxy stands first on the PATH under the names sbatch, squeue, kubectl, docker and ssh; docker and sshd are real. A
file says what happens to which of the next commands.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from . import fake_kubectl

# The proxy reads its weather from a file named after the tool: KIND NUMBER FAIR, for NUMBER commands after FAIR others.
PROXY = r"""#!/bin/bash
tool=${0##*/}
kind= number=0 fair=0
[ ! -e "$WEATHER/$tool" ] || read -r kind number fair < "$WEATHER/$tool"
if [ "$fair" -gt 0 ]; then
  echo "$kind $number $((fair - 1))" > "$WEATHER/$tool"; kind=
elif [ "$number" -gt 0 ]; then
  echo "$kind $((number - 1)) 0" > "$WEATHER/$tool"
else
  kind=
fi
echo "$tool $kind $*" | head -n 1 >> "$WEATHER/calls"
case $kind in
  delay-*) sleep "${kind#delay-}" ;;
  never) exec sleep 600 ;;
  lost) echo 'ssh: connect to host x port 22: Connection timed out' >&2; exit 255 ;;
esac
[ "$kind" = late ] && { "$WEATHER/real/$tool" "$@" > /dev/null 2>&1; exec sleep 600; }
[ -n "$kind" ] && [[ $kind != delay-* ]] || exec "$WEATHER/real/$tool" "$@"
out=$(mktemp)
"$WEATHER/real/$tool" "$@" > "$out"
code=$?
size=$(stat -c %s "$out")
case $kind in
  cut) head -c $((size / 2)) "$out" ;;
  empty) ;;
  repeated) cat "$out" "$out" ;;
  chatty) echo 'Welcome. Quota at 95 %'; cat "$out" ;;
  garbled) head -c $((size / 3)) "$out"; printf '\xff{]\n\r~'; tail -c $((size / 3)) "$out" ;;
  failed) cat "$out"; echo 'slurm: Socket timed out on send/recv operation: unexpected EOF' >&2; code=1 ;;
esac
rm -f "$out"
exit $code
"""
# Jobs are folders; a job ends when its script does.
SBATCH = r"""#!/bin/bash
script=${!#}
[ -z "$SBATCH_PARTITION" ] || { echo 'sbatch: error: invalid partition specified' >&2; exit 1; }
mkdir -p "$SLURM/jobs"
id=100; until mkdir "$SLURM/jobs/$id" 2> /dev/null; do id=$((id + 1)); done
echo "$script" > "$SLURM/jobs/$id/script"; id -un > "$SLURM/jobs/$id/user"
echo RUNNING > "$SLURM/jobs/$id/state"
(exec > /dev/null 2>&1 < /dev/null 9>&-
 trap '' HUP; SLURM_JOB_ID=$id setsid bash "$script" & echo $! > "$SLURM/jobs/$id/pid"; wait $!
 [ $? = 0 ] && echo COMPLETED > "$SLURM/jobs/$id/state" || echo FAILED > "$SLURM/jobs/$id/state") &
echo "$id"
"""
SQUEUE = r"""#!/bin/bash
case "$*" in
  *--jobs=*) id=${*##*--jobs=}; id=${id%% *}; cat "$SLURM/jobs/$id/state" 2> /dev/null ;;
  *) for job in "$SLURM"/jobs/*; do
       [ "$(cat "$job/state" 2> /dev/null)" != RUNNING ] || echo "${job##*/} $(cat "$job/script")"
     done ;;
esac
"""
TOOLS = {"sbatch": SBATCH, "squeue": SQUEUE}
TOOLS |= {"scancel": "#!/bin/sh\n", "sacct": "#!/bin/sh\nexit 1\n"}
PROXIED = ("sbatch", "squeue", "kubectl", "docker", "ssh")


def install(folder: Path, **others: str) -> dict[str, str]:
    """Write proxies and engines into a folder; return the environment in which they are found. ``others`` are programs
    in the place of those that the PATH has."""
    real, first = folder / "weather" / "real", folder / "proxy"
    for place in (real, first, folder / "cluster" / "data", folder / "cluster" / "pod"):
        place.mkdir(parents=True)
    (folder / "cluster" / "apis").write_text("")
    kubectl = f'#!/bin/sh\nexec {sys.executable} {fake_kubectl.__file__} "$@"\n'
    found = {name: others.get(name) or shutil.which(name) for name in ("docker", "ssh")}
    behind = {name: f'#!/bin/sh\nexec {program} "$@"\n' for name, program in found.items()}
    for name, text in {**TOOLS, "kubectl": kubectl, **behind}.items():
        (real / name).write_text(text)
        (real / name).chmod(0o755)
    for name in PROXIED:
        (first / name).write_text(PROXY)
        (first / name).chmod(0o755)
    return {
        "WEATHER": str(folder / "weather"),
        "SLURM": str(folder / "slurm"),
        "CLUSTER": str(folder / "cluster"),
        "PATH": f"{first}:{real}:{os.environ['PATH']}",
    }
