"""The example plugins are short, keep the contract, and what one remembers survives a kill."""

from __future__ import annotations

import importlib
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp_cli.run import State
from tests.chaos.kill import kill_at_random, outcome
from tests.worker.conftest import work

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(params=["momentum", "product"])
def plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A plugin in a folder on the import path, as in an environment's site-packages."""
    name, site = request.param, tmp_path / "site"
    info = site / f"sparsebp_{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(PLUGINS / f"sparsebp-{name}" / f"sparsebp_{name}.py", site)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sparsebp-{name}\nVersion: 0.1.0\n")
    target = f"sparsebp_{name}:{name.capitalize()}"
    (info / "entry_points.txt").write_text(f"[sparsebp.policies]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    return str(name)


def test_a_killed_run_with_a_plugin_resumes_to_the_same_bits(tiny_recipe, prepared, plugin: str) -> None:
    recipe = tiny_recipe(training={"max_steps": 20}, checkpoint={"every": 2}, policy=[{"name": plugin, "keep": 0.5}])
    straight, run, chance = prepared(recipe), prepared(recipe), random.Random(0)
    assert work(straight) == 0
    for _ in range(2):
        kill_at_random(run, chance)
    assert work(run) == 0
    assert run.state() is State.FINISHED
    assert outcome(run) == outcome(straight)


@pytest.mark.always("momentum")
@pytest.mark.parametrize("name", ["momentum", "product"])
def test_a_plugin_is_under_50_lines_and_its_own_tests_pass(name: str) -> None:
    folder = PLUGINS / f"sparsebp-{name}"
    assert len((folder / f"sparsebp_{name}.py").read_text().splitlines()) < 50
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stdout
