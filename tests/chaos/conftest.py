"""What trials of faults start from: the small recipe and model of the worker's tests, and the engine of target's."""

from __future__ import annotations

from tests.target.conftest import docker_engine, docker_options
from tests.worker.conftest import prepared, tiny_folder, tiny_recipe

__all__ = ["docker_engine", "docker_options", "prepared", "tiny_folder", "tiny_recipe"]
