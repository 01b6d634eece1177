"""The folder of checkpoints: what lies there beside checkpoints is left alone, and takes no place of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsebp_cli.worker.checkpoint import CheckpointFolder, RankState, Snapshot

pytestmark = pytest.mark.promise("R22")


def snapshot(step: int) -> Snapshot:
    own = RankState({}, {"torch": torch.get_rng_state(), "cuda": [], "python": [], "numpy": []})
    state = {0: {"exp_avg": torch.ones(3), "step": torch.tensor(float(step))}}
    return Snapshot(step, {"w": torch.full((3,), float(step))}, {"state": state, "param_groups": []}, {}, [own])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


STRANGERS = ("step-foo", "step-00000002.bak", "step-00000003.bak", "step-12", "step-000000001", "notes.txt")


def test_strangers_beside_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = CheckpointFolder(folder, keep_last=2)
    for name in STRANGERS[:-1]:
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")
    (folder / STRANGERS[-1]).write_text("of a user")
    for step in (1, 2, 3):
        checkpoints.save(snapshot(step))
    assert checkpoints.steps() == [3, 2]
    again = CheckpointFolder(folder, keep_last=2)
    found, damaged = again.load_newest_good()
    assert found is not None
    assert (found.step, damaged) == (3, [])
    assert names(folder) == sorted([*STRANGERS, "step-00000002", "step-00000003"])


def test_junk_with_the_name_of_a_later_checkpoint_takes_no_slot_of_the_rotation(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    (tmp_path / "step-99999999").mkdir()
    (tmp_path / "step-00000000").mkdir()
    for step in (1, 2, 3):
        checkpoints.save(snapshot(step))
    assert names(tmp_path) == ["step-00000000", "step-00000002", "step-00000003", "step-99999999"]
    found, damaged = CheckpointFolder(tmp_path, keep_last=2).load_newest_good()
    assert found is not None
    assert found.step == 3
    assert len(damaged) == 1
    assert "step-99999999" in damaged[0]


def test_a_file_with_the_name_of_a_checkpoint_is_put_aside(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    (tmp_path / "step-00000001").write_text("of a user")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000002").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".part-00000003").write_text("half")
    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    assert checkpoints.steps() == []
    for step in (1, 2):
        checkpoints.save(snapshot(step))
    assert checkpoints.steps() == [2, 1]
    assert (tmp_path / "step-00000001.aside-1").read_text() == "of a user"
    assert (tmp_path / "step-00000002.aside-1").is_symlink()


def test_a_damaged_checkpoint_that_was_passed_over_takes_no_slot_of_the_rotation(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    for step in (4, 8):
        checkpoints.save(snapshot(step))
    (tmp_path / "step-00000008" / "weights.safetensors").write_bytes(b"")
    again = CheckpointFolder(tmp_path, keep_last=2)
    found, damaged = again.load_newest_good()
    assert found is not None
    assert (found.step, len(damaged)) == (4, 1)
    again.save(snapshot(9))
    assert again.steps() == [9, 8, 4]  # two good ones to fall back to, and the damaged one


def test_no_clock_decides_which_checkpoint_is_the_newest(tmp_path: Path) -> None:
    import os

    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        place = checkpoints.save(snapshot(step))
        os.utime(place, (1e9 - 3600 * step, 1e9 - 3600 * step))  # the clock goes back an hour each time
    assert checkpoints.steps() == [3, 2]
    found, _ = CheckpointFolder(tmp_path, keep_last=2).load_newest_good()
    assert found is not None
    assert found.step == 3
