"""Build the SkyPilot task of a run, without running anything.

The machine that SkyPilot starts has SparseBP but not this package, so the task contains the text of the relay.
"""

from __future__ import annotations

import shlex
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from sparsebp_sky.option import SkyOptions

MOUNT = "sparsebp-bucket"  # below the machine's home folder, where SkyPilot may always create a folder
FOLDER = "sparsebp"  # folder in the bucket
END = "END_OF_RELAY"


def make_task(options: SkyOptions, run_id: str, name: str) -> dict[str, Any]:
    """Return the task that runs a run; ``name`` is the job's name, and that of its folder in the bucket."""
    task: dict[str, Any] = {"name": name, "resources": _make_resources(options)}
    if options.pool is None:
        # MOUNT, because with MOUNT_CACHED a close returns before the upload, and uploads have no order. See the relay.
        mounts = {f"~/{MOUNT}": options.bucket, **options.mounts}
        task["file_mounts"] = {place: {"source": url, "mode": "MOUNT"} for place, url in mounts.items()}
        if options.setup:
            task["setup"] = "\n".join(["set -e", *options.setup]) + "\n"
    if options.env:
        task["envs"] = dict(options.env)
    if options.secrets:
        task["secrets"] = dict.fromkeys(options.secrets)  # without values: sky reads them from its own environment
    return {**task, "run": _make_script(options, run_id, name)}


def to_text(task: dict[str, Any]) -> str:
    """Return a task as YAML, without folded shell lines."""
    return yaml.dump(task, Dumper=_Plain, sort_keys=False, width=10**6)


def _make_resources(options: SkyOptions) -> dict[str, Any]:
    wanted: dict[str, Any] = {"cpus": options.cpus, "memory": options.memory, "disk_size": options.disk_gb}
    resources = {name: value for name, value in wanted.items() if value is not None}
    if options.pool is None:
        resources["use_spot"] = options.spot
    if options.recovery:
        resources["job_recovery"] = {"strategy": options.recovery}
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    choices = [
        {**({"infra": infra} if infra else {}), **({"accelerators": gpus} if gpus else {})}
        for infra, gpus in product(options.infra or [""], options.gpus or [""])
    ]
    return resources | (choices[0] if len(choices) == 1 else {"any_of": choices})


def _make_script(options: SkyOptions, run_id: str, name: str) -> str:
    relay = Path(__file__).with_name("relay.py").read_text(encoding="utf-8")
    words = [options.python, "-P"]
    command = " ".join(shlex.quote(word) for word in words)
    rest = " ".join(shlex.quote(word) for word in (run_id, options.worker, f"{options.sync_seconds:g}"))
    return (
        f"cat > \"$HOME/.{name}.py\" <<'{END}'\n{relay}{END}\n"
        f'exec {command} "$HOME/.{name}.py" "$HOME/{MOUNT}/{FOLDER}/{name}" {rest}\n'
    )


class _Plain(yaml.SafeDumper):
    """A YAML dumper that writes multi-line texts as blocks, and no aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _represent)
