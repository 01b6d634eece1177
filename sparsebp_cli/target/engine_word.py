"""Explain the error messages of engines, with what to do about them: a table of patterns for each engine.

The engine's own message stays in the line, and our explanation follows it.
"""

from __future__ import annotations

import re

TOOLKIT = "install nvidia-container-toolkit on that machine (`nvidia-ctk runtime configure`), then restart docker"
ARCHITECTURE = "the image is for another CPU architecture: build or pull it for the architecture of that machine"

# docker and podman, with containerd, runc and the NVIDIA toolkit behind them
DOCKER: tuple[tuple[str, str], ...] = (
    (r"could not select device driver .*\[\[?gpu", TOOLKIT),
    (r"(unknown|invalid) runtime( name)?:? nvidia", TOOLKIT),
    (
        r"unresolvable CDI devices",
        "describe the GPUs of that machine: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`",
    ),
    (r"nvidia-container-cli.*(unknown device|device error)", "there is no such GPU: see target.gpus"),
    (r"nvidia-container-cli.*(driver|initialization|nvml)", "the NVIDIA driver of that machine does not work"),
    (r"exec format error|does not match the (detected|specified)|no matching manifest for", ARCHITECTURE),
    (r"permission denied.*docker.*sock", "join the group docker there, or use an engine of your own (rootless)"),
    (r"cannot connect to the docker daemon|is the docker daemon running", "start docker there; see target.host"),
    (r"cannot connect to podman", "start podman there; see target.context"),
    (
        r"pull access denied|requested access to the resource is denied|unauthorized:",
        "run `docker login` there, or correct target.image",
    ),
    (r"toomanyrequests", "the registry limits pulls without a login: run `docker login` there"),
    (r"manifest unknown|manifest for .* not found", "the registry has no such tag: see target.image"),
    (
        r"(dial tcp|lookup) .*(no such host|timeout|refused)",
        "that machine does not reach the registry: copy the image there, with `docker save` and `docker load`",
    ),
    (r"no such image|image not known", "pull or build it there; see target.pull"),
    (
        r"malformed HTTP (status|response|version)",
        "the login shell there prints text that docker cannot read: `ssh HOST true` shows this text",
    ),
    (r"exec:? .*(not found|no such file)", "the image has no such program: see target.python"),
    (
        r"bind source path does not exist|invalid mount config|statfs .*no such file",
        "that folder is not on the engine's machine: see target.mounts",
    ),
    (r"network \S+ not found", "there is no such network on the engine: see target.network"),
    (r"minimum memory limit|invalid memory|memory limit should", "see target.memory"),
    (r"no space left on device", "the disk of the engine is full: `docker system prune` there makes room"),
)
# sbatch, squeue, srun
SLURM: tuple[tuple[str, str], ...] = (
    (r"invalid partition", "`sinfo` lists the partitions: see target.partition"),
    (r"invalid account", "`sacctmgr show associations user=$USER` lists your accounts: see target.account"),
    (r"invalid qos", "`sacctmgr show qos` lists the allowed names: see target.arguments"),
    (
        r"requested time limit is invalid|time limit specification",
        "`sinfo --format='%P %l'` shows the limits: see target.timeout_min",
    ),
    (
        r"violates accounting/qos policy",
        "your account or QOS limits jobs, CPUs, GPUs or time: see target.account, arguments, gpus, timeout_min",
    ),
    (
        r"memory specification can not be satisfied|memory required by task is not available",
        "no node has this much memory: lower target.memory",
    ),
    (
        r"generic resource \(gres\)|invalid gres",
        "`sinfo --format='%P %G'` shows the GPUs of each partition: see target.gpus",
    ),
    (
        r"node configuration is not available",
        "no node of that partition has enough GPUs, CPUs or memory: lower target.gpus, target.cpus or target.memory",
    ),
    (
        r"more processors requested than permitted|node count specification",
        "see target.cpus, target.nodes, and the limits of the partition",
    ),
    (
        r"group not permitted|access/permission denied",
        "you may not use that partition: see target.partition, target.account",
    ),
    (r"invalid feature", "`sinfo --format='%P %f'` lists the features: see target.arguments"),
    (
        r"requested partition configuration not available",
        "the partition is down, or its limits are lower than requested: see target.timeout_min",
    ),
    (
        r"(sbatch|squeue|sinfo|scancel):? (command )?not found",
        "Slurm's commands are not on the PATH there: add the line that loads them to target.setup",
    ),
    (r"unable to contact slurm controller", "`scontrol ping` there says whether the controller is up"),
)

_KNOWN = [(re.compile(pattern, re.IGNORECASE), text) for pattern, text in DOCKER + SLURM]


def explain(words: str) -> str:
    """Return an engine's message with what to do about it, if known; else the message unchanged."""
    ours = next((text for pattern, text in _KNOWN if pattern.search(words)), "")
    return f"{words.rstrip('.')}: {ours}" if ours else words
