"""Recipes on disk, and policies that are really installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import find_policies
from sparsebp_cli.recipe import Recipe, load_recipe

INSTALLED = ", ".join(find_policies())  # of this machine: plugins may be among them

SMALL = """\
version: 1
name: small
model: {name: austen-llama}
dataset: {name: python-docs}
"""

POLICY_FILE = '''\
"""Policies of a plugin."""
from typing import Annotated, Literal

from pydantic import Field, field_validator

from sparsebp_cli.policy import GradientSelector, Policy


class Half(GradientSelector):
    """Keep half."""
    keep: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(0.25, description="Share.")
    span: tuple[int, int] = Field((0, 4), description="From and to.")
    mode: Literal["near", "far"] = "near"

    @field_validator("span")
    @classmethod
    def rise(cls, value):
        if value[0] > value[1]:
            raise ValueError("span must\\nrise")
        if value[0] == 13:
            raise ZeroDivisionError("unlucky")
        return value

    exact = property(lambda self: False)
    unbiased = property(lambda self: False)
    budget = property(lambda self: 0.5)
    selection = property(lambda self: None)

    def select(self, grad_NO, site, step):
        return None


class Unfinished(GradientSelector):
    """Leaves everything open."""


class Kindless(Policy):
    """Answers no question."""
    exact = property(lambda self: False)
    unbiased = property(lambda self: False)


class Named(Half):
    """Has an option called name."""
    name: str = "x"


class Dropper(Policy):
    """A kind of the plugin's own."""
    from abc import abstractmethod

    @abstractmethod
    def drop(self): ...


class Never(Dropper):
    """Drops nothing."""
    rate: float = 0.5
    exact = property(lambda self: True)
    unbiased = property(lambda self: True)

    def drop(self):
        return None


NOT_A_POLICY = 3
'''


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Write ``r.yaml`` into an empty working directory and load it by that name."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def load(text: str | bytes, *changes: str) -> Recipe:
        Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_recipe(Path("r.yaml"), changes)

    return load


@pytest.fixture
def refuse(read: Callable[..., Recipe]) -> Callable[..., str]:
    """Load a recipe that must be refused, and return the one line that the user sees."""

    def load(text: str | bytes, *changes: str) -> str:
        with pytest.raises(UsageError) as caught:
            read(text, *changes)
        line = str(caught.value)
        assert line.isprintable(), "one printable line"
        assert caught.value.exit_code == 2
        return line

    return load


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution: a module and a ``.dist-info`` in a folder on ``sys.path``."""
    modules: list[str] = []

    def write(distribution: str, entries: dict[str, str], source: str = POLICY_FILE) -> None:
        site = tmp_path / "site" / distribution
        module = distribution.replace("-", "_")
        info = site / f"{module}-2.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n")
        lines = [f"{name} = {module}:{target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[sparsebp.policies]", *lines, ""]))
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        modules.append(module)

    yield write
    for module in modules:
        sys.modules.pop(module, None)
