"""The fixtures of SparseBP's own tests, whose helpers these tests use as well."""

from __future__ import annotations

import pytest

from tests.conftest import _keep_process, home_folder
from tests.worker.conftest import prepared, tiny_folder, tiny_recipe

__all__ = ["_keep_process", "home_folder", "prepared", "tiny_folder", "tiny_recipe"]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests, which have models, alone with ``--fast``."""
    return True if config.getoption("fast", default=False) else None
