"""Start child interpreters: Python processes that run the package's own modules, and nothing from the working folder.

``python -m`` and ``python -c`` search the working folder first. So a ``pip.py`` or ``torch.py`` in an unpacked folder
would run with the user's rights. ``-P`` prevents this, and the environment has no PYTHONPATH entry that depends on the
working folder. Every child starts through this module; a test checks this.

Environment variables that libraries read are hidden arguments. For example, ``accelerate launch`` leaves
ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 in a shell, which would divide every gradient by four. So a process that trains
or measures gets only the variables in the two lists below, and those that its target names in ``env`` or ``setup``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

PYTHON: str = sys.executable

# Places and identities: users, paths, proxies, certificates, caches, tokens, devices. Event logs record only the names,
# because logs are shared.
PLACES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("XDG_*", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX"),
    *("*_PROXY", "*_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HF_HOME", "HF_*_CACHE", "HF_HUB_*", "HF_XET_*", "HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH"),
    *("*_OFFLINE", "HUGGINGFACE_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN", "DO_NOT_TRACK", "HF_ALLOW_CODE_EVAL"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "TRITON_HOME", "TOKENIZERS_*"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "*_VISIBLE_DEVICES", "CUDA_MPS_*", "NVIDIA_DRIVER_CAPABILITIES"),
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "SPARSEBP_*"),
)
# Variables that may change a number or a time. Event logs record the values, and `compare` reports differences.
NUMBERS = (
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "RAYON_NUM_THREADS"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "NCCL_*", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_*", "FI_*"),
)
_EXPORT = re.compile(r"\bexport\s+([A-Za-z_]\w*)")


def command(*words: str) -> list[str]:
    """Return the command line that starts this interpreter with arguments, such as ``-m MODULE``."""
    return [PYTHON, "-P", *words]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with the variables in ``more``. PYTHONPATH keeps only absolute entries:
    relative and empty ones depend on the working folder."""
    found = {**os.environ, **(more or {})}
    kept = [entry for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if Path(entry).is_absolute()]
    found["PYTHONSAFEPATH"] = "1"  # -P for the child's own children, such as inductor's and MLflow's
    return found | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})


def worker_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process that trains or measures: our declared variables, and those in ``more``."""
    given = more or {}
    return {name: value for name, value in environment(given).items() if name in given or is_declared(name)}


def keep_declared(env: Mapping[str, str], secrets: Iterable[str] = (), setup: Iterable[str] = ()) -> None:
    """Remove all undeclared variables from this process: on a cluster, this module does not start the worker. The
    arguments are what the target declares: values, names, and shell lines, whose exports are kept."""
    named = {*env, *secrets, *(name for line in setup for name in _EXPORT.findall(line))}
    for name in [name for name in os.environ if name not in named and not is_declared(name)]:
        del os.environ[name]
    for name, value in env.items():
        os.environ.setdefault(name, value)  # lines of setup may have changed it


def is_declared(name: str, patterns: Iterable[str] = (*PLACES, *NUMBERS)) -> bool:
    """Return whether a worker gets this environment variable."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def describe_variables() -> dict[str, object]:
    """Return the values of this process's variables that may change numbers, and names of other declared ones."""
    places = sorted(name for name in os.environ if is_declared(name, PLACES))
    numbers = {name: os.environ[name] for name in sorted(os.environ) if name not in places and is_declared(name)}
    return {"variables": numbers, "other_variables": " ".join(places)}
