"""Hook into every Python process of an audited command; it starts the audit once torch computes gradients.

Python imports this before the process's own code. It imports only the standard library, because most processes of a
command (launchers, data loaders) train nothing. Another ``sitecustomize`` later on the path is imported as usual.
"""
# ruff: noqa: SLF001 - torch.autograd._engine_run_backward, which every backward pass calls, is private; tests check it

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

STARTED: list[bool] = []
FOLDER = Path(__file__).resolve().parent


class TorchFinder:
    """A meta path finder that imports torch as Python would, then installs the hooks of :func:`wait`."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return torch's spec; None for everything else."""
        if name != "torch":
            return None
        # Otherwise the search below would call this finder again.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:  # many libraries search for torch without importing it
            sys.meta_path.insert(0, self)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                run(module)
                wait(module)

            loader.exec_module = exec_module
        return spec


def wait(torch: ModuleType) -> None:
    """Start the audit at the first module call with gradients enabled, or the first backward pass. Until then import
    nothing additional, because the process may still configure libraries."""
    call, run = torch.nn.Module.__call__, torch.autograd._engine_run_backward

    def begin_once() -> None:
        # A library may have wrapped either function since: its wrapper stays, and ours then only forwards.
        if torch.nn.Module.__call__ is first_call:
            torch.nn.Module.__call__ = call
        if torch.autograd._engine_run_backward is first_run:
            torch.autograd._engine_run_backward = run
        begin()

    @functools.wraps(call)
    def first_call(module: Callable[..., object], *args: object, **kwargs: object) -> object:
        if STARTED or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        begin_once()
        return module(*args, **kwargs)

    @functools.wraps(run)
    def first_run(*args: object, **kwargs: object) -> object:
        if STARTED:
            return run(*args, **kwargs)
        begin_once()
        return torch.autograd._engine_run_backward(*args, **kwargs)

    torch.nn.Module.__call__, torch.autograd._engine_run_backward = first_call, first_run
    atexit.register(note_idle)


def note_idle() -> None:
    """Record at exit that this process imported torch and computed no gradients."""
    if not STARTED:
        with contextlib.suppress(OSError):
            (Path(os.environ["SPARSEBP_AUDIT_FOLDER"]) / f"idle-{os.getpid()}").touch()


def begin() -> None:
    """Start the audit; if that fails, record why and leave the process alone."""
    STARTED.append(True)
    try:
        script = importlib.import_module("sparsebp_audit.process.script")
        script.begin_watching()
    except Exception as error:
        note = Path(os.environ["SPARSEBP_AUDIT_FOLDER"]) / f"failed-{os.getpid()}"
        text = f"{sys.executable}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == "sparsebp_audit":
            text = f"{sys.executable} has no sparsebp-audit: install it into that environment as well"
        with contextlib.suppress(OSError):
            note.write_text(text, encoding="utf-8")


# Without this folder the import below finds the sitecustomize that this one hides.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
this: ModuleType = sys.modules.pop(__name__)
try:
    importlib.import_module(__name__)
except ImportError:
    sys.modules[__name__] = this
if os.environ.get("SPARSEBP_AUDIT_FOLDER"):
    with contextlib.suppress(OSError):
        (Path(os.environ["SPARSEBP_AUDIT_FOLDER"]) / f"python-{os.getpid()}").touch()
    sys.meta_path.insert(0, TorchFinder())
