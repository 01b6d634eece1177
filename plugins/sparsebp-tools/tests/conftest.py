"""The fixtures of SparseBP's own tests, whose helpers these tests use as well."""

from __future__ import annotations

import pytest

from tests.conftest import _forget_compiled, _keep_process, home_folder

__all__ = ["_forget_compiled", "_keep_process", "home_folder"]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests, which have models, alone with ``--fast``."""
    return True if config.getoption("fast", default=False) else None
