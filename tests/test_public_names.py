"""What is public can be imported, is documented, and is known to type checkers by its own type."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sparsebp_cli as sbp
from sparsebp_cli import errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "reference" / name for name in ("api.md", "errors.md")]

MISTAKES = """\
from torch import nn
import sparsebp_cli as sbp
import sparsebp_cli.testing as testing

model = nn.Linear(2, 2)
sbp.atach(model, [])
sbp.attach(model, [], sites="lineras")
sbp.attach(model, [], eager_clip="exakt", update="eager")
sbp.attach(model, [], execution="fast", checkpointing="sparse", reference="batch")
sbp.memory_trase
sbp.memory_trace(3)
testing.check_polisy
testing.check_policy(3)
try:
    sbp.make_policy("topk", keep=0.5)
except sbp.UsageError:
    pass
"""


def test_every_error_is_exported() -> None:
    known = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert {name for name in sbp.__all__ if name.endswith("Error")} == known
    assert sbp.DivergedError is errors.DivergedError


@pytest.mark.parametrize("module", ["sparsebp_cli", "sparsebp_cli.policy", "sparsebp_cli.testing"])
def test_every_public_name_can_be_imported_and_is_documented(module: str) -> None:
    names = import_module(module).__all__
    assert [name for name in names if not hasattr(import_module(module), name)] == []
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    text += "".join(file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "guide").glob("*.md"))
    assert [name for name in names if not re.search(rf"\b{name}\b", text) and name != "__version__"] == []


@pytest.mark.types
def test_a_type_checker_finds_typos_and_wrong_choices(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(MISTAKES)
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *settings, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"script\.py:(\d+): error: (.*?)  \[([\w-]+)\]", done.stdout)
    assert [(int(line), kind) for line, _, kind in found] == [
        (6, "attr-defined"),
        (7, "arg-type"),
        (8, "arg-type"),
        (10, "attr-defined"),
        (11, "arg-type"),
        (12, "attr-defined"),
        (13, "arg-type"),
    ], done.stdout
    assert 'has no attribute "atach"' in found[0][1]
