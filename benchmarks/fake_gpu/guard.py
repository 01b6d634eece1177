"""Loads ``guard.cpp``, compiled against the installed torch, and imports torch between its two steps."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def load() -> None:
    """Compile the guard, once a machine, load it, import torch, and put it in force.

    Raises:
        RuntimeError: torch was imported already.
        FileNotFoundError: There is no compiler, ``g++``.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the guard must be loaded before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    key = hashlib.blake2b(f"{root}{(root / 'version.py').read_text()}{SOURCE.read_text()}".encode(), digest_size=8)
    library = Path(tempfile.gettempdir()) / f"sparsebp-guard-{key.hexdigest()}.so"
    if not library.exists():
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        links = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        part = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-O1", *includes, str(SOURCE), "-o", str(part), *links]
        subprocess.run(command, check=True)
        part.replace(library)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")
    loaded.install_guard()
