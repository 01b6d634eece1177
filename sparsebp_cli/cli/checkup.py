"""The checks of ``sparsebp doctor``. torch is imported in a separate process."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal
from urllib.parse import urlsplit

from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.errors import SparseBPError, explain_system_error, first_line
from sparsebp_cli.run import home, interpreter
from sparsebp_cli.run.folder import check_locks
from sparsebp_cli.target.contract import CheckResult

PACKAGES = ("sparsebp", "torch", "transformers", "accelerate", "peft", "datasets", "mlflow")
LITTLE_SPACE = 5e9
TIMEOUT_SECONDS = 5.0
TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
                  "threads": torch.get_num_threads()}))
"""


def check_all() -> list[CheckResult]:
    """Return the results of all checks, in the order in which they are shown."""
    checks = [check_python(), check_packages(), *check_torch(), check_home(), check_space(), check_store()]
    return [*checks, *check_policies(), check_schema(), *check_notices()]


def check_python() -> CheckResult:
    """Return version and location of Python."""
    return CheckResult("ok", "python", f"{platform.python_version()} in {sys.prefix}")


def check_packages() -> CheckResult:
    """Return versions of the main packages."""
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return CheckResult("fail", "packages", f"missing: {', '.join(missing)}", "install sparsebp again with pip")
    return CheckResult("ok", "packages", ", ".join(found))


def check_torch() -> list[CheckResult]:
    """Check whether torch can be imported, and list its devices."""
    done = subprocess.run(
        interpreter.command("-c", TORCH),
        env=interpreter.worker_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        torch: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = (done.stderr.strip().splitlines() or ["Python could not import torch, and printed no reason"])[-1]
        return [CheckResult("fail", "torch", reason, "install torch again for this machine")]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
    gpus = ", ".join(torch["gpus"]) or "no GPU: the CPU is used"
    lost = bool(torch["cuda"]) and not torch["gpus"]
    hint = "this torch is built for CUDA, but finds no GPU: is the driver installed?" if lost else ""
    threads = f"{torch['threads']} threads of torch, {os.cpu_count()} processors"
    return [
        CheckResult("warn" if lost else "ok", "torch", f"{torch['version']} ({build}); {gpus}", hint),
        CheckResult("ok", "threads", threads),
    ]


def check_home() -> CheckResult:
    """Check whether runs can be written."""
    try:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home()) as file:
            file.write(b"x" * 4096)
        check_locks(home())
    except OSError as error:
        return CheckResult(
            "fail",
            "home",
            explain_system_error(error) or f"{home()}: {error.strerror}",
            "set SPARSEBP_HOME to a folder that can be written",
        )
    return CheckResult("ok", "home", str(home()))


def check_space() -> CheckResult:
    """Check whether there is space for checkpoints."""
    folder = home()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    few = free < LITTLE_SPACE
    hint = "checkpoints of a large model may not fit; remove old runs or set SPARSEBP_HOME" if few else ""
    return CheckResult("warn" if few else "ok", "disk", f"{show_count(free, 'B')} free", hint)


def check_store() -> CheckResult:
    """Check whether the tracking store answers, without creating anything."""
    from sparsebp_cli.recipe.store_address import sqlite_file
    from sparsebp_cli.run.visible import mask
    from sparsebp_cli.tracking import resolve_uri
    from sparsebp_cli.tracking.store import is_server, is_sqlite

    try:
        uri = resolve_uri(None)
    except SparseBPError as error:
        return CheckResult("fail", "tracking", str(error), "correct MLFLOW_TRACKING_URI")
    try:
        if is_sqlite(uri):
            if not sqlite_file(uri).exists():
                return CheckResult("ok", "tracking", f"{mask(uri)} (the first run creates it)")
            with sqlite3.connect(f"file:{sqlite_file(uri)}?mode=ro", uri=True, timeout=TIMEOUT_SECONDS) as database:
                count = database.execute("select count(*) from runs").fetchone()[0]
            # The block above ends a transaction, but closes nothing.
            database.close()
            return CheckResult("ok", "tracking", f"{mask(uri)} ({count} runs)")
        if is_server(uri):
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=TIMEOUT_SECONDS).close()
        else:
            place = urlsplit(uri)
            socket.create_connection((place.hostname or "localhost", place.port or 5432), TIMEOUT_SECONDS).close()
    except (OSError, sqlite3.Error, ValueError) as error:
        hint = "runs continue without MLflow; later, `sparsebp sync --all` sends their numbers"
        return CheckResult("warn", "tracking", f"{mask(uri)} does not answer: {error}", hint)
    return CheckResult("ok", "tracking", mask(uri))


def check_notices() -> list[CheckResult]:
    """Return a warning if there is a file of settings, which SparseBP no longer reads."""
    from sparsebp_cli.recipe.target import describe_settings

    return [CheckResult("warn", "notify", text)] if (text := describe_settings()) else []


def check_policies() -> list[CheckResult]:
    """Check whether every installed policy can be used."""
    from sparsebp_cli.policy import find_policies

    found = find_policies()
    hint = "update or uninstall that package"
    broken = [
        CheckResult("warn", "policy", f"{name} of {policy.source}: {policy.problem}", hint)
        for name, policy in found.items()
        if policy.policy_class is None
    ]
    usable = [name for name, policy in found.items() if policy.policy_class is not None]
    level: Literal["ok", "fail"] = "ok" if usable else "fail"
    return [
        CheckResult(level, "policies", ", ".join(usable) or "none", "" if usable else "install sparsebp again"),
        *broken,
    ]


def check_schema() -> CheckResult:
    """Check whether the recipe schema can be made with all installed policies."""
    from sparsebp_cli.recipe import recipe_schema

    try:
        schema = recipe_schema()
    except Exception as error:  # a plug-in's options may break it in any way
        return CheckResult("fail", "recipes", f"{type(error).__name__}: {first_line(error)}", "see `sparsebp policies`")
    return CheckResult("ok", "recipes", f"schema with {len(schema['$defs'])} sections")
