"""Commands that are printed to be copied: none of them writes over a file."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import sparsebp_cli
from sparsebp_cli.compare import compare_runs

from .conftest import MakeRun

SOURCES = sorted(Path(sparsebp_cli.__file__).parent.rglob("*.py"))
OVERWRITES = re.compile(r"sparsebp [a-z-]+ [^`'\"]*>\s*[\w{$]")  # `sparsebp show ID -o yaml > dense.yaml`


def test_the_commands_for_missing_controls_redirect_nothing_into_a_file(make_run: MakeRun) -> None:
    policy = [{"name": "topk", "keep": 0.1, "along": "rows"}]
    runs = [make_run(seed=seed) for seed in range(3)]
    runs += [make_run("dense", seed, policy=policy, exact=False, executed=0.2) for seed in range(3)]
    commands = [control.command for control in compare_runs(runs).controls if not control.found]
    alone = [control.command for control in compare_runs(runs[3:]).controls]
    assert len(commands) >= 2
    assert len(alone) >= 2
    for command in filter(None, [*commands, *alone]):
        words = list(shlex.shlex(command, posix=False, punctuation_chars=True))
        assert words[:5] == ["sparsebp", "run", "--like", words[3], "--name"]
        assert not {">", ">>", "|", "&&", ";", "<"}.intersection(words)


def test_no_text_of_the_source_is_a_command_that_writes_over_a_file() -> None:
    assert OVERWRITES.search("sparsebp show {id} -o yaml > {file} && sparsebp run x")
    found = []
    for file in SOURCES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{x}" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            found += [f"{file.name}:{node.lineno}" for line in text.splitlines() if OVERWRITES.search(line)]
    assert not found
