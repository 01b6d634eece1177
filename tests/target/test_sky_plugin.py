"""The package of the target ``sky``: its own tests pass, with it installed as pip would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin import PLUGINS, write_metadata

PLUGIN = PLUGINS / "sparsebp-sky"
FILES = ["test_conformance.py", "test_sky.py", "test_task.py test_relay.py"]


@pytest.mark.slow
@pytest.mark.parametrize("files", FILES)
def test_the_target_sky_passes_its_own_tests(files: str, tmp_path: Path) -> None:
    write_metadata(PLUGIN, tmp_path / "site")
    paths = [str(tmp_path / "site"), str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(PLUGIN / "tests" / file) for file in files.split()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PLUGIN, env=environment)
    assert result.returncode == 0, result.stdout


def test_no_file_of_its_tests_is_left_out() -> None:
    assert {file.name for file in (PLUGIN / "tests").glob("test_*.py")} == set(" ".join(FILES).split())
