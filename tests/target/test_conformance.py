"""Every target keeps the contract, by the public suite."""

from __future__ import annotations

from pathlib import Path

from sparsebp_cli.testing import FakeTarget, check_target


def test_local_keeps_the_contract() -> None:
    check_target("local")


def test_the_fake_keeps_the_contract(tmp_path: Path) -> None:
    check_target(FakeTarget(tmp_path / "there"))
