"""Which architectures a policy goes with: what the tests find is what docs/reference/architectures.md says.

``pytest --architectures -n 0 -m ""`` with the tests that call :func:`hold` writes what they find instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

FILE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.json"


def hold(config: pytest.Config, column: str, found: dict[str, str], *, is_whole: bool = True) -> None:
    """Fail unless the file says what was found with the same release of transformers.

    Args:
        config: Says whether to write instead.
        column: Name of the trial, a key of the file.
        found: Class of a model, and why it is refused; empty where it works.
        is_whole: Whether all models of the release were tried; those of a part are never written.
    """
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if config.getoption("architectures") and is_whole:
        known |= {"transformers": transformers.__version__, column: dict(sorted(found.items()))}
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    elif known["transformers"] == transformers.__version__:
        assert {kind: why for kind, why in known[column].items() if is_whole or kind in found} == found
