"""Files of runs are written durably, and by one module; child interpreters start through one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sparsebp_cli
from benchmarks import house

ROOT = Path(sparsebp_cli.__file__).parents[1]
# Files that write by themselves, and why a power cut may take what they write.
EXEMPT = {
    "run/durable.py": "is the one that writes",
    "run/journal.py": "appends, fsyncs at checkpoints and at the end; and the outline, a cache",
    "run/manifest.py": "lists the files of a folder, which durable.put_folder syncs",
    "worker/reference.py": "scores of a reference model: a cache, scored again",
    "worker/checkpoint.py": "fills a part that durable.put_folder syncs",
    "asset/fetched.py": "fills a part that durable.sync_content syncs",
    "release/folder.py": "fills a part that durable.filling syncs",
    "compare/archive.py": "unpacks into a temporary folder",
    "plan/repository.py": "a temporary git folder, and that of a checkout",
    "target/relay.py": "worker.log, the output of a process",
    "judge/script_arms.py": "output.log, the output of a process",
    "worker/node.py": "an empty file by which nodes find out whether they share a disk",
    "cli/housekeeping.py": "renames what it deletes",
    "cli/outlet.py": "the null device",
    "cli/app.py": "error.log, a traceback",
    "worker/peak_memory.py": "a file of /proc",
    "process/site/sitecustomize.py": "a note of a failure, in a temporary folder; imports nothing of the package",
}
NO_FILES = {"dataclasses", "durable", "self.states"}  # whose functions have names like those of files
BARE = {"write_text", "write_bytes", "rename", "touch", "copyfile", "copytree", "copy2", "copyfileobj", "move"}


def find_bare_writes(source: str) -> Iterator[int]:
    """Yield the lines of a module that write, rename or copy files by themselves."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        owner, _, name = function.rpartition(".")
        texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        opens = name == "open" and any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts)
        # A text's replace takes two arguments, a path's one.
        replaces = function == "os.replace" or (name == "replace" and len(node.args) == 1 and not node.keywords)
        if owner not in NO_FILES and ((name in BARE and owner) or opens or (replaces and owner)):
            yield node.lineno


def list_modules() -> Iterator[tuple[str, str]]:
    for package in (ROOT / folder for folder in house.PACKAGES):
        for file in sorted(package.rglob("*.py")):
            yield str(file.relative_to(package)), file.read_text(encoding="utf-8")


def test_every_file_but_caches_is_written_through_one_module() -> None:
    found = {name: [*find_bare_writes(source)] for name, source in list_modules()}
    assert {name: lines for name, lines in found.items() if lines and name not in EXEMPT} == {}
    assert [name for name in EXEMPT if not found.get(name)] == []


def test_a_bare_write_is_found() -> None:
    source = "p.write_text(s)\np.replace(q)\nos.replace(p, q)\nopen(p, 'wb')\ns.replace('a', 'b')\np.open('rb')\n"
    assert [*find_bare_writes(source)] == [1, 2, 3, 4]


# Rooms that open files of somebody else's runs, and what in them opens others by itself.
READERS = ("cli", "compare", "judge", "release", "run", "study", "target", "tracking", "verb")
OWN_FILES = {
    "verb/audit_process.py": "what the audited command wrote into a temporary folder of ours",
    "cli/schema.py": "a page in the package",
    "cli/starter/shipped.py": "a recipe in the package",
    "cli/starter/template/__init__.py": "a template in the package",
    "verb/script_line.py": "the user's own script, which may be a link",
    "judge/ledger.py": "the ledger of this home, whatever its size",
    "judge/script_arms.py": "results of this home",
    "target/confinement.py": "a file of /proc",
}


def find_bare_reads(source: str) -> Iterator[int]:
    """Yield the lines of a module that open files to read by themselves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            if node.func.attr in {"read_bytes", "read_text"} or (node.func.attr == "open" and texts & {"rb", "r"}):
                yield node.lineno


def test_files_of_runs_are_opened_through_one_module() -> None:
    found = {name: [*find_bare_reads(source)] for name, source in list_modules() if name.startswith(READERS)}
    assert {name: lines for name, lines in found.items() if lines and name not in OWN_FILES} == {}
    assert [name for name in OWN_FILES if not found.get(name)] == []
    assert [*find_bare_reads("p.read_bytes()\np.open('rb')\nopen_regular(p)\np.open('wb')\n")] == [1, 2]


def test_child_interpreters_start_through_one_module() -> None:
    named = {name for name, source in list_modules() if "sys.executable" in source}
    assert named == {"run/interpreter.py", "process/site/sitecustomize.py"}  # the second only names it in an error


def test_git_is_called_through_one_module() -> None:
    """A second way to call it once ran what a repository configures."""
    git = re.compile(r"""["'](/[^"' ]*/)?git["']""")
    assert [name for name, source in list_modules() if git.search(source)] == ["plan/repository.py"]
