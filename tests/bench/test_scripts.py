"""Every script of ``benchmarks/`` starts and tells its options; tests beside it hold what some of them measure."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
SOURCES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.py"))}
SCRIPTS = [name for name, source in SOURCES.items() if 'if __name__ == "__main__":' in source]

# One process for all of them: most import torch.
HELP = """
import contextlib, io, json, runpy, sys
folder, *names = sys.argv[1:]
said = {}
for name in names:
    file, out, code = f"{folder}/{name}.py", io.StringIO(), None
    sys.argv = [file, "--help"]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        code = end.code
    said[name] = [code, out.getvalue()]
print(json.dumps(said))
"""


def test_every_script_answers_help() -> None:
    command = [sys.executable, "-c", HELP, str(FOLDER), *SCRIPTS]
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {name: code for name, (code, _) in said.items()} == dict.fromkeys(SCRIPTS, 0)
    assert [name for name, (_, text) in said.items() if not text.startswith(f"usage: {name}.py")] == []


def test_every_other_file_is_imported_by_a_script() -> None:
    imported = {
        node.module or ""
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
    } | {
        alias.name
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert SOURCES.keys() - set(SCRIPTS) - {name.rpartition(".")[2] for name in imported} == set()


def test_the_page_of_the_benchmarks_names_every_script() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"{name}.py" not in page] == []
