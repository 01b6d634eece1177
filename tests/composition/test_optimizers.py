"""Optimizers are found by name before torch is loaded: plugins', and every class of torch.optim."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.policy.composition import find_optimizer, list_optimizers
from sparsebp_cli.recipe import load_recipe

PLUGIN = """\
from sparsebp_cli.policy.composition import OptimizerEntry

SIGN = OptimizerEntry("sign_plugin_class:SignDescent", ("momentum",))
NOTHING = "no entry"
"""
CLASS = '''\
import torch


class SignDescent(torch.optim.Optimizer):
    """Steps by the sign of the gradient."""

    def __init__(self, params, lr=1e-3, momentum=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
'''
RECIPE = """\
version: 1
name: small
model: {name: austen-llama}
dataset: {name: python-docs}
training: {optim: NAME, optim_args: {ARGUMENT: 0.5}}
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that offers an optimizer, a module that is not there, and something that is no entry."""
    (tmp_path / "sign_plugin.py").write_text(PLUGIN)
    (tmp_path / "sign_plugin_class.py").write_text(CLASS)
    info = tmp_path / "sign-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sign\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[sparsebp.optimizers]\nsign = sign_plugin:SIGN\n"
        "absent = sign_plugin_absent:X\nno-entry = sign_plugin:NOTHING\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def recipe(tmp_path: Path, name: str, argument: str = "momentum") -> Path:
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.replace("NAME", name).replace("ARGUMENT", argument))
    return file


@pytest.mark.model
def test_an_optimizer_of_a_plugin_is_checked_and_made(plugin: None, tmp_path: Path) -> None:
    import torch

    from sparsebp_cli.worker.optimizer import build_optimizer

    training = load_recipe(recipe(tmp_path, "sign")).training
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer(training, [weight])
    weight.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([-3e-4, 3e-4])
    with pytest.raises(
        RecipeError, match=r"r.yaml:5:38: .*momentun: not an argument of sign; allowed: momentum; did you mean"
    ):
        load_recipe(recipe(tmp_path, "sign", "momentun"))


def test_a_broken_or_unknown_optimizer_is_one_line(plugin: None, tmp_path: Path) -> None:
    for name, text in {
        "absent": "'absent' is broken: ModuleNotFoundError: No module named 'sign_plugin_absent'",
        "no-entry": "'no-entry' is broken: sign_plugin:NOTHING must be an OptimizerEntry",
        "adagard": "got 'adagard', allowed: .*did you mean adagrad",
        "lbfgs": "got 'lbfgs', allowed:",  # each step needs the loss as a function
    }.items():
        with pytest.raises(UsageError, match=text) as caught:
            find_optimizer(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"r.yaml:5:19: training.optim: got 'adamv'"):
        load_recipe(recipe(tmp_path, "adamv"))


def test_weights_are_cut_into_parts_only_for_optimizers_that_say_so(plugin: None) -> None:
    entries = {name: find_optimizer(name) for name in list_optimizers() if name not in ("absent", "no-entry")}
    sharded = [name for name, entry in entries.items() if entry.is_sharded]
    assert sharded == ["adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "sgd"]


def test_optimizers_are_listed_without_importing_torch() -> None:
    code = (
        "import sys; from sparsebp_cli.policy.composition import find_optimizer, list_optimizers\n"
        "print([find_optimizer(name).place for name in list_optimizers()] != [], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True False\n", "")
