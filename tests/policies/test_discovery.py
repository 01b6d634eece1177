"""Plugins are found by their entry point; a broken one is shown with its reason."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import find_policies, make_policy

PLUGIN = Path(__file__).parents[2] / "plugins" / "sparsebp-stride"


def _install(folder: Path, distribution: str, entry_points: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[sparsebp.policies]\n{entry_points}\n")


@pytest.fixture
def site_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, as an environment's site-packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return folder


def test_working_plugin_is_found_with_its_source(site_folder: Path) -> None:
    shutil.copy(PLUGIN / "sparsebp_stride.py", site_folder / "stride_from_outside.py")
    _install(site_folder, "outside", "outside-stride = stride_from_outside:Stride")
    found = find_policies()["outside-stride"]
    assert (found.source, found.kind, found.problem) == ("outside 0.1.0", "GradientSelector", "")
    assert make_policy("outside-stride", every=4).model_dump()["every"] == 4


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import a_package_that_nobody_has", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("raise SystemError('two\\nlines')", "SystemError: two"),
        ("Thing = 1", "{module}:Thing is not a Policy class"),
        ("class Other: pass", "AttributeError: "),
        (
            "from sparsebp_cli.policy import GradientSelector\nclass Thing(GradientSelector): pass",
            "{module}:Thing does not implement: budget, exact, select, selection, unbiased",
        ),
    ],
)
def test_broken_plugin_is_shown_with_its_reason(site_folder: Path, module: str, problem: str) -> None:
    name = f"broken_{abs(hash(module))}"
    (site_folder / f"{name}.py").write_text(module + "\n")
    _install(site_folder, "broken", f"thing = {name}:Thing")
    found = find_policies()
    assert found["thing"].kind == "broken"
    assert found["thing"].source == "broken 0.1.0"
    assert found["thing"].problem.startswith(problem.format(module=name))
    assert found["topk"].problem == ""
    with pytest.raises(PolicyError, match=r"'thing' of broken 0\.1\.0 is broken"):
        make_policy("thing")


def test_name_offered_twice_is_broken_and_names_both(site_folder: Path) -> None:
    _install(site_folder, "thief", "topk = sparsebp_cli.policies.dense:Dense")
    found = find_policies()["topk"]
    assert found.policy_class is None
    assert "thief 0.1.0" in found.problem
    assert f"sparsebp {version('sparsebp')}" in found.problem


def test_wrong_option_names_the_right_one() -> None:
    with pytest.raises(PolicyError, match=r"policy 'topk': kep: .*did you mean keep\?"):
        make_policy("topk", keep=0.5, kep=0.5)
    with pytest.raises(PolicyError, match=r"policy 'topk': keep: .*1\.5"):
        make_policy("topk", keep=1.5)
    with pytest.raises(PolicyError, match=r"unknown policy 'topq'.*did you mean topk\?"):
        make_policy("topq")


def test_finding_and_checking_options_does_not_import_torch() -> None:
    code = (
        "import sys; from sparsebp_cli.policy import find_policies, make_policy; find_policies();"
        "make_policy('topk', keep=0.1); make_policy('random', keep=0.1); make_policy('dense');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_example_plugin_is_short() -> None:
    assert len((PLUGIN / "sparsebp_stride.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_example_plugin_passes_its_own_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PLUGIN)
    assert result.returncode == 0, result.stdout
