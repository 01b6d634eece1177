"""The package of the target ``sky``: its own tests pass, with it installed as pip would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin import PLUGINS, write_metadata

PLUGIN = PLUGINS / "sparsebp-sky"


@pytest.mark.slow
def test_the_target_sky_passes_its_own_tests(tmp_path: Path) -> None:
    write_metadata(PLUGIN, tmp_path / "site")
    paths = [str(tmp_path / "site"), str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PLUGIN, env=environment)
    assert result.returncode == 0, result.stdout
