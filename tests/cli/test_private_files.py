"""What a run leaves on disk is its owner's alone, unless the owner shares it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sparsebp_cli.run import create_run, list_runs

from .conftest import Cli, Write


def modes(folder: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def test_nobody_else_can_read_anything_that_a_run_writes(cli: Cli, write_recipe: Write, home_folder: Path) -> None:
    assert cli("run", write_recipe(), "--set", "training.max_steps=3").returncode == 0
    (run,) = list_runs()
    found = modes(home_folder)
    assert {run.path / "plan.json", run.path / "journal.jsonl", run.log_file} <= set(map(Path, found))
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}


def test_runs_are_shared_on_purpose_as_far_as_the_umask_lets_them(
    cli: Cli, write_recipe: Write, home_folder: Path
) -> None:
    before = os.umask(0o027)
    try:
        assert cli("run", write_recipe(), "--set", "training.max_steps=3", SPARSEBP_SHARED="1").returncode == 0
    finally:
        os.umask(before)
    (run,) = list_runs()
    found = modes(run.path)
    assert found[str(run.path)] == 0o750
    assert found[str(run.plan_file)] == 0o640


def test_a_run_made_by_the_library_is_private_too(home_folder: Path) -> None:
    assert stat.S_IMODE(create_run("0123456789ab").path.stat().st_mode) == 0o700


def test_what_a_person_asks_for_by_name_follows_their_umask(call: Cli, two_runs: None, tmp_path: Path) -> None:
    assert call("compare", "@2", "--html", tmp_path / "report.html").returncode == 0
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644
