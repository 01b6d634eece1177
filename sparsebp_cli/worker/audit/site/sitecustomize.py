"""Imported by every Python process of a command that is audited, before its own code; waits until torch is imported.

Nothing but the standard library is imported here: most processes of a command (launchers, loaders of data) train
nothing. Another ``sitecustomize`` further on the path is imported as if this one were not there.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent


class TorchFinder:
    """Finds torch as Python would, and begins to watch when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - Python's signature
        """Return torch's spec; None for everything else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                begin()

            loader.exec_module = exec_module
        return spec


def begin() -> None:
    """Watch this process; say so where that cannot be done, and leave the process alone."""
    try:
        script = importlib.import_module("sparsebp_cli.worker.audit.script")
        script.begin_watching()
    except Exception as error:
        note = Path(os.environ["SPARSEBP_AUDIT_FOLDER"]) / f"failed-{os.getpid()}"
        with contextlib.suppress(OSError):
            note.write_text(f"{sys.executable}: {type(error).__name__}: {error}", encoding="utf-8")


sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
this = sys.modules.pop(__name__)
try:
    importlib.import_module(__name__)
except ImportError:
    sys.modules[__name__] = this
if os.environ.get("SPARSEBP_AUDIT_FOLDER"):
    sys.meta_path.insert(0, TorchFinder())
