"""What trials of faults start from: the small recipe and model of the worker's tests."""

from __future__ import annotations

from tests.worker.conftest import prepared, tiny_folder, tiny_recipe

__all__ = ["prepared", "tiny_folder", "tiny_recipe"]
