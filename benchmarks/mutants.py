"""Count the mutants of guard code that the tests of their modules kill.

    python benchmarks/mutants.py                          # every named mutant, and a draw of 6 others of each module
    python benchmarks/mutants.py --only archive --draw 30  # one module; the result file stays as it is

``mutants.yaml`` names the modules, their tests, mutants by hand, and drawn mutants that no test can kill. A drawn
mutant changes one place in a function: it negates a condition, moves a bound, swaps a constant or ``and`` and ``or``,
drops a call, a ``raise`` or a keyword argument, or returns at once. The commit's hash decides which ones are drawn.

Each mutant is tested in a fork of a process that has imported libraries such as torch, but nothing of the package, in a
copy of the checkout. Child processes of a test thus meet the mutant, too. mutmut 3.8 mutates no function with a
decorator, which every context manager of the guards has, and cosmic-ray 8.7 starts Python anew for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE, RESULT = ROOT / "benchmarks/mutants.yaml", ROOT / "benchmarks/results/mutants.json"
PLUGINS = ("plugins/sparsebp-lab", "plugins/sparsebp-shelf", "plugins/sparsebp-tools")
QUIET = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
OPTIONS = (
    "-W",
    QUIET,
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow and not chaos and not long",
    "--no-header",
)
PLAIN, KILLED, TOO_LATE = 0, 1, -signal.SIGKILL  # exit codes of pytest: all passed, some failed; and of a timeout
BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
BOUNDS |= {ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Mutant:
    """A changed module. ``change`` tells the lines that differ; it is the name of the mutant."""

    module: str
    file: str
    change: str
    source: str


def mutate(source: str) -> Iterator[tuple[str, str]]:
    """Yield each change of a module with the source that results."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    content = source.encode()

    def place(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    nodes = {node: None for function in functions for part in function.body for node in [function, *ast.walk(part)]}
    for node in nodes:
        for begin, end, text in _edits(node, place, content):
            changed = (content[:begin] + text.encode() + content[end:]).decode()
            yield _describe(content, begin, end, text), changed


Edit = tuple[int, int, str]  # begin, end, the text that is put between


def _edits(node: ast.AST, place: Callable[[Any], tuple[int, int]], content: bytes) -> Iterator[Edit]:
    """Yield the changes of one node."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield _negate(*place(node.test), content)
    if isinstance(node, ast.comprehension):
        yield from (_negate(*place(condition), content) for condition in node.ifs)
    if isinstance(node, ast.Compare):
        yield place(node.left)[1], place(node.comparators[0])[0], f" {BOUNDS[type(node.ops[0])]} "
    if isinstance(node, ast.BoolOp):
        begin, end = place(node.values[0])[1], place(node.values[1])[0]
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield begin, end, content[begin:end].decode().replace(old, new, 1)
    if isinstance(node, ast.Constant) and type(node.value) in {bool, int, float}:
        yield *place(node), repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield *place(node), "pass"
    if isinstance(node, ast.Call):
        for keyword in [keyword for keyword in node.keywords if keyword.arg is not None]:
            begin, end = place(keyword)
            yield begin, len(content) - len(content[end:].lstrip(b", \n")), ""
    if isinstance(node, ast.FunctionDef):
        yield from _return_at_once(node, place)


def _negate(begin: int, end: int, content: bytes) -> Edit:
    return begin, end, f"(not ({content[begin:end].decode()}))"


def _return_at_once(node: ast.FunctionDef, place: Callable[[Any], tuple[int, int]]) -> Iterator[Edit]:
    """Yield the change, if the first statement is not all that there is: other mutants drop that one."""
    has_text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    first = node.body[int(has_text and len(node.body) > 1)]
    if not isinstance(first, ast.Return | ast.Expr | ast.FunctionDef):
        yield place(first)[0], place(first)[0], f"return\n{' ' * first.col_offset}"


def _describe(content: bytes, begin: int, end: int, text: str) -> str:
    """Return the lines that change and what they become, with single spaces."""
    first, last = content.rfind(b"\n", 0, begin) + 1, content.find(b"\n", end)
    before, after = (
        content[first:last].decode(),
        (content[first:begin] + text.replace("\n", ";").encode() + content[end:last]).decode(),
    )
    return f"{' '.join(before.split())} -> {' '.join(after.split())}"


def list_mutants(module: str, row: dict[str, Any], seed: str, limit: int) -> list[Mutant]:
    """Return the named mutants of a module and so many drawn ones. Raise ``SystemExit`` for a name without a place."""
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in row["files"]}
    named, drawn = [], {}
    for one in row.get("named", ()):
        source = (ROOT / one["file"]).read_text(encoding="utf-8")
        if source.count(one["old"]) != 1:
            raise SystemExit(f"mutants.yaml: {one['file']} has {source.count(one['old'])} places for: {one['says']}")
        named.append(Mutant(module, one["file"], one["says"], source.replace(one["old"], one["new"])))
    for file, source in sources.items():
        drawn |= {(file, change): Mutant(module, file, change, changed) for change, changed in mutate(source)}
    for one in row.get("equivalent", ()):
        if not [drawn.pop(key) for key in [*drawn] if key[1] == one["change"]]:
            raise SystemExit(f"mutants.yaml: no mutant is: {one['change']}")
    order = sorted(drawn, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest())
    return named + [drawn[key] for key in order[:limit]]


def copy_checkout(folder: Path) -> None:
    """Copy every file that git knows or would add, and what Python has compiled."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for part in ("sparsebp_cli", "tests", *PLUGINS):  # compiled modules: copied files keep their times
        for compiled in (ROOT / part).rglob("__pycache__"):
            shutil.copytree(compiled, folder / compiled.relative_to(ROOT), dirs_exist_ok=True)


def start_tests(folder: Path, tests: Sequence[str], log: Path) -> int:
    """Fork a process that runs tests in a copy, and return its id."""
    if process := os.fork():
        return process
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    paths = [str(folder), *(str(folder / plugin) for plugin in PLUGINS)]
    sys.path[:] = paths + [entry for entry in sys.path if not entry.startswith(str(ROOT / "benchmarks"))]
    temporary = folder.parent / f"{folder.name}-tmp"
    temporary.mkdir(exist_ok=True)
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(temporary))
    sys.dont_write_bytecode, tempfile.tempdir = True, None
    code: int = 2
    try:
        import pytest

        code = int(pytest.main([*OPTIONS, "--basetemp", str(temporary / "pytest"), "--rootdir", str(folder), *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_all(jobs: Sequence[Mutant], table: dict[str, Any], args: argparse.Namespace, folder: Path) -> Iterator[bool]:
    """Test mutants, several at once, and yield for each in order whether a test killed it."""
    copies = [folder / f"copy-{number}" for number in range(args.processes)]
    for copy in copies:
        if not copy.exists():
            copy_checkout(copy)
    waiting, busy, free, codes = list(enumerate(jobs)), {}, copies, {}
    for number in range(len(jobs)):
        while number not in codes:
            while free and waiting:
                index, mutant = waiting.pop(0)
                copy = free.pop()
                shutil.copy2(ROOT / mutant.file, copy / mutant.file)
                (copy / mutant.file).write_text(mutant.source, encoding="utf-8")
                shutil.rmtree((copy / mutant.file).parent / "__pycache__", ignore_errors=True)
                process = start_tests(copy, table[mutant.module]["tests"], folder / f"{index}.log")
                busy[process] = (index, mutant, copy, time.monotonic() + args.timeout)
            time.sleep(0.05)
            for process, (index, mutant, copy, end) in [*busy.items()]:
                if time.monotonic() > end:
                    os.kill(process, signal.SIGKILL)
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    _end_group(process)
                    shutil.copy2(ROOT / mutant.file, copy / mutant.file)
                    codes[index] = os.waitstatus_to_exitcode(status)
                    del busy[process]
                    free.append(copy)
        yield codes[number] != PLAIN


def _end_group(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what tests of a mutant started and left


def main() -> None:
    """Test the mutants, print the scores, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="modules of mutants.yaml; writes no result")
    parser.add_argument("--draw", type=int, default=6, help="drawn mutants of each module")
    parser.add_argument("--seed", help="another draw than that of the commit; writes no result")
    parser.add_argument("--processes", type=int, default=2, help="mutants that are tested at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, after which a mutant counts as killed")
    args = parser.parse_args()
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    chosen = args.only or list(table)
    ask = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    first = [Mutant(name, table[name]["files"][0], "", (ROOT / table[name]["files"][0]).read_text()) for name in chosen]
    jobs = [job for name in chosen for job in list_mutants(name, table[name], args.seed or commit, args.draw)]
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MKL_CBWR="COMPATIBLE", HF_HUB_OFFLINE="1")
    for library in {library for name in chosen for library in table[name]["imports"]}:
        importlib.import_module(library)
    rows: dict[str, Any] = {name: {"named": 0, "drawn": 0, "tried": 0, "killed": 0, "survivors": []} for name in chosen}
    with tempfile.TemporaryDirectory(prefix="sparsebp-mutants-") as made:
        for job, is_killed in zip(first, run_all(first, table, args, Path(made)), strict=True):
            if is_killed:
                said = (Path(made) / f"{first.index(job)}.log").read_text(encoding="utf-8")
                raise SystemExit(f"the tests of {job.module} fail without a mutant:\n{said[-2000:]}")
        for job, is_killed in zip(jobs, run_all(jobs, table, args, Path(made)), strict=True):
            row, is_named = rows[job.module], any(one["says"] == job.change for one in table[job.module]["named"])
            row["named" if is_named else "drawn"] += 1
            row["tried"] += 1
            row["killed"] += is_killed
            row["survivors"] += [] if is_killed else [f"{job.file}: {job.change}"]
            print("killed  " if is_killed else "SURVIVED", f"{job.file}: {job.change}", flush=True)
    print_scores(rows)
    if not args.only and not args.seed:
        facts = {"commit": commit, "date": datetime.now(UTC).date().isoformat(), "machine": platform.machine()}
        RESULT.write_text(json.dumps({**facts, "modules": rows}, indent=1) + "\n", encoding="utf-8")


def print_scores(rows: dict[str, Any]) -> None:
    """Print the scores of the modules and of all."""
    for name, row in rows.items():
        print(f"{name}: {row['killed']} of {row['tried']} killed ({row['named']} named, {row['drawn']} drawn)")
    killed, tried = (sum(row[key] for row in rows.values()) for key in ("killed", "tried"))
    print(f"all: {killed} of {tried} killed, {100 * killed / max(1, tried):.0f} %")


if __name__ == "__main__":
    main()
