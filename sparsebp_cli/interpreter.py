"""Child interpreters: Python processes that run the package's own modules, and nothing of the working folder.

``python -m`` and ``python -c`` search the working folder first, so a ``pip.py`` or ``torch.py`` in an unpacked folder
would run with the rights of the user. ``-P`` prevents that, and the environment has no entry of PYTHONPATH that depends
on the working folder. Every child starts through this module; a test holds the package to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PYTHON: str = sys.executable


def command(*words: str) -> list[str]:
    """Return the words that start this interpreter with arguments, such as ``-m MODULE``."""
    return [PYTHON, "-P", *words]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, without the entries of PYTHONPATH that mean the working folder or one below
    it by a relative path (an empty entry does, too), and with the variables in ``more``."""
    found = {**os.environ, **(more or {})}
    kept = [entry for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if Path(entry).is_absolute()]
    found["PYTHONSAFEPATH"] = "1"  # -P for the children that this child starts, such as inductor's and MLflow's
    return found | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})
