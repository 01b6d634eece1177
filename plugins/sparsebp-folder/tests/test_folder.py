from pathlib import Path

import pytest

from sparsebp_cli.testing import check_target


def test_folder_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEBP_HOME", str(tmp_path / "home"))
    check_target("folder", there=str(tmp_path / "there"))
