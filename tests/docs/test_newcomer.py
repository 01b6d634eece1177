"""A newcomer does five jobs with nothing but what the documentation says, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.block import FOLLOWED, ROOT, Block, blocks, commands

GUIDE = ROOT / "docs" / "guide"
TRAINS = {"run", "compare", "show"}
Shell = Callable[..., str]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run a program in the newcomer's folder; it must succeed. Return what it printed."""
    programs = str(Path(sys.executable).parent)

    def execute(*words: str, path: str = "") -> str:
        environment = os.environ | {
            "SPARSEBP_HOME": str(tmp_path / "home"),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": path,
            "COLUMNS": "100",
        }
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    return execute


def of(page: Path, found: list[Block]) -> list[Block]:
    """The blocks of a page, of which there must be some."""
    mine = [block for block in found if block.file == page]
    assert mine, page
    return mine


def write_data(shell: Shell, page: Path = FOLLOWED[0]) -> list[list[str]]:
    """Run the Python blocks of a tutorial, and return its commands."""
    for block in of(page, blocks("python")):
        shell(sys.executable, "-c", block.text)
    return [shlex.split(command.text) for command in of(page, commands())]


@pytest.mark.slow
def test_data_of_ones_own_become_recipes_that_are_valid(shell: Shell, tmp_path: Path) -> None:
    for words in write_data(shell):
        if words[1] not in TRAINS:
            shell(*words)
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 100
    assert "sums.jsonl" in (tmp_path / "sums" / "dense.yaml").read_text()


@pytest.mark.long
def test_data_of_ones_own_are_trained_on_and_compared(shell: Shell, tmp_path: Path) -> None:
    printed = [shell(*words) for words in write_data(shell)]
    assert "exact: what differs is rounding" in " ".join("\n".join(printed).split())
    assert len((tmp_path / "ids").read_text().split()) == 2
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()[:100].lower()


@pytest.mark.long  # the commands of these pages each: test_starter.py, test_data.py
def test_a_chat_file_becomes_recipes_that_are_valid_and_is_shown(shell: Shell, tmp_path: Path) -> None:
    printed = [shell(*words) for words in write_data(shell, FOLLOWED[1]) if words[1] not in TRAINS]
    assert len((tmp_path / "chat.jsonl").read_text().splitlines()) == 80
    assert "assistant:\n[[" in printed[-1]


@pytest.mark.long
def test_a_chat_file_becomes_a_model_that_answers(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = [shell(*words) for words in write_data(shell, FOLLOWED[1])]
    assert "exact: what differs is rounding" in " ".join("\n".join(printed).split())
    runs = (tmp_path / "ids").read_text().split()
    monkeypatch.setenv("MODEL", str(tmp_path / "home" / "runs" / runs[-1] / "model"))
    [*_, ask] = of(FOLLOWED[1], blocks("python"))
    assert re.fullmatch(r"\s*\d+\s*", shell(sys.executable, "-c", ask.text))


@pytest.mark.slow
def test_a_policy_of_ones_own_is_written_installed_and_tested(shell: Shell, tmp_path: Path) -> None:
    [command] = [each for each in of(GUIDE / "policy.md", commands()) if " new policy " in each.text]
    words = shlex.split(command.text)
    shell(*words)
    package = f"sparsebp-{words[-1]}"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", "site")
    shell(sys.executable, "-m", "pip", "install", *options, f"./{package}")
    listed = json.loads(shell("sparsebp", "policies", "-o", "json", path=str(tmp_path / "site")))
    assert words[-1] in json.dumps(listed)
    assert "passed" in shell(sys.executable, "-m", "pytest", "-q", package, path=str(tmp_path / "site"))


LOOP = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (3, 2, 12))]
"""


def test_a_loop_of_ones_own_trains_with_a_policy(shell: Shell) -> None:
    printed = shell(sys.executable, "-c", LOOP + of(GUIDE / "library.md", blocks("python"))[0].text)
    assert re.match(r"3 backward passes, \d+ sites", printed)


def prepare_study(tmp_path: Path, changes: dict[str, str]) -> list[list[str]]:
    """Write the guide's study beside the recipes, and return the guide's commands. Every change must apply."""
    text = of(GUIDE / "study.md", blocks("yaml"))[0].text
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "study.yaml").write_text(text)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "pyproject.toml").touch()  # recipes have their base in the same checkout
    found = [shlex.split(command.text) for command in of(GUIDE / "study.md", commands())]
    about = {"study.yaml", "selective-rows", "@selective-rows"}
    return [words for words in found if about & set(words) and "--target" not in words]


def test_the_study_of_the_guide_is_planned(shell: Shell, tmp_path: Path) -> None:
    first, *_ = prepare_study(tmp_path, {})
    printed = shell(*first)
    assert all(word in printed for word in ("dense", "topk", "dropbp", "rehearse", "tune", "report"))


@pytest.mark.long
def test_a_small_form_of_the_study_is_trained_and_compared(shell: Shell, tmp_path: Path) -> None:
    small = {"[5e-4, 1e-3, 2e-3]": "[1e-3]", "{same: cost, as: dense, steps: 60}": "{same: steps, steps: 10}"}
    small |= {"report: 3-5": "report: 1", "controls: auto": "controls: none", "tune: 0-2": "tune: [1]"}
    words = prepare_study(tmp_path, small)
    for file in (tmp_path / "recipes").rglob("*.yaml"):
        text = re.sub(r"max_seq_length: \d+", "max_seq_length: 32", file.read_text())
        file.write_text(re.sub(r"(per_device_train_batch_size|eval_examples): \d+", r"\1: 2", text))
    printed = "".join(shell(*each) for each in words)
    assert all(arm in printed for arm in ("dense", "topk", "dropbp"))
