"""Methods with a measure of their own, written once more as packages: they train as the built-in ones, bit for bit.

Each is a file and its ``pyproject.toml``; nothing else knows of it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.policy import find_policies
from sparsebp_cli.testing import check_policy
from tests.backward.conftest import tiny_model, tokens
from tests.plugin import write_metadata

PACKAGES = Path(__file__).parents[1] / "plugins"
NUM_STEPS = 6
CASES = [
    ("grades", {"threshold": 1.3, "grace": 0.3}),
    ("grades", {"threshold": 0.9, "grace": 0.3, "relative": True}),
    ("grades", {"threshold": 0.9, "grace": 0.3, "relative": True, "by": "random"}),
    ("importance", {"keep": 0.5, "every": 2, "threshold": 1.05}),
    ("importance", {"keep": 0.4, "threshold": 0.0}),
    ("importance", {"keep": 0.5, "every": 3, "smoothing": 0.5}),
]


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in PACKAGES.iterdir():
        monkeypatch.syspath_prepend(str(package))
        write_metadata(package, tmp_path)
    importlib.invalidate_caches()


def _train(name: str, options: dict[str, Any], stop: int | None = None) -> tuple[list[Tensor], set[str]]:
    """Train with two micro-batches a step, and return the weights and what was said of it. With ``stop`` the training
    goes on from there in new objects."""
    model, optimizer, engine = _make(name, options)
    for index in range(NUM_STEPS):
        if index == stop:
            saved = model.state_dict(), optimizer.state_dict(), engine.state_dict()
            model, optimizer, engine = _make(name, options)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            engine.load_state_dict(saved[2])
        for micro in range(2):
            ids = tokens(2 * index + micro, batch=5, length=8)
            engine.backward(model(input_ids=ids, labels=ids).loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    left = {name for name, p in model.named_parameters() if p not in optimizer.state}
    return [parameter.detach().clone() for parameter in model.parameters()], left


def _make(name: str, options: dict[str, Any]) -> Any:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, sbp.attach(model, {"name": name, **options}, optimizer=optimizer, num_steps=NUM_STEPS)


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_package_trains_as_the_built_in_form_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    built_in, packaged = _train(name, options), _train(f"package-{name}", options)
    assert _same(built_in[0], packaged[0])
    assert built_in[1] == packaged[1]  # what is frozen has no optimizer state
    assert (name == "grades") == bool(built_in[1])
    assert not _same(built_in[0], _train(name, {"threshold": 0.0} if name == "grades" else {"keep": 1.0})[0])


@pytest.mark.parametrize("number", [1, 3])
def test_a_package_goes_on_from_its_state_bit_for_bit(number: int) -> None:
    name, options = CASES[number]
    assert _same(_train(f"package-{name}", options)[0], _train(f"package-{name}", options, stop=3)[0])


@pytest.mark.parametrize(("name", "options"), [CASES[1], CASES[2], CASES[4]], ids=str)
def test_a_package_keeps_the_contract(name: str, options: dict[str, Any]) -> None:
    assert find_policies()[f"package-{name}"].source == f"sparsebp-{name} 0.1.0"
    check_policy(f"package-{name}", **options)
