"""The tiers of tests: fast, ordinary, long; and the sample that `make test` takes.

The fast tier, ``pytest --fast``, is the files that ``fast_files`` in pyproject.toml names; none of them trains a model.
What makes it fast is held, not hoped for: in a session with ``--fast`` an import of transformers, of what stands on it,
or of MLflow fails in the process of the tests. Tests of these files that need one all the same are marked ``model``;
those and the slow ones are left to the ordinary run. What a test starts as a process of its own is not looked at.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

HEAVY = frozenset({"accelerate", "datasets", "mlflow", "peft", "torchao", "transformers"})
LEFT_OUT = ("slow", "model", "compiles")
SLOW_SHARE, QUICK_SHARE = 6, 4  # one of so many slow tests of a file is drawn, and of the others in sampled_folders
FAST = pytest.StashKey[set[Path]]()


class HeavyImportError(AssertionError):
    """A test of the fast tier imports what the tier does without. No ImportError, which programs get over."""


class Barrier:
    """The first finder of modules in the process; refuses the heavy ones and finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse, or leave the search to the next finder."""
        if name.partition(".")[0] in HEAVY:
            raise HeavyImportError(
                f"the fast tier imports {name}: mark the test `model`, or take its file out of fast_files"
            )
        return None


def add_option(parser: pytest.Parser) -> None:
    """Add ``--fast`` and ``--sample``, and the lists that they read."""
    parser.addoption("--fast", action="store_true", help="only the files of fast_files, without transformers")
    parser.addoption("--sample", action="store_true", help="some tests and cases, by the hash of the commit")
    parser.addini("sampled_folders", "folders of tests of which --sample takes a quarter", type="linelist")
    parser.addini("fast_files", "patterns of the files of the fast tier", type="linelist")


def is_left_alone(path: Path, config: pytest.Config) -> bool:
    """Return whether a file is not of the fast tier, or a folder, whose conftest.py may import anything, has none."""
    if FAST not in config.stash:
        root = config.rootpath
        files = {file for pattern in config.getini("fast_files") for file in root.glob(pattern)}
        config.stash[FAST] = files | {folder for file in files for folder in file.parents}
    return path not in config.stash[FAST]


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of fast files that are not fast."""
    gone = [item for item in items if any(item.get_closest_marker(name) for name in LEFT_OUT)]
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=gone)


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests with ``always`` that it does not name as ``long``."""
    found: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("always")
        if mark is None:
            continue
        function, _, rest = item.nodeid.partition("[")
        case = rest.rpartition("]")[0]
        found.setdefault(function, set(mark.args)).discard(case)
        if case not in mark.args:
            item.add_marker(pytest.mark.long)
    unknown = {name: sorted(cases) for name, cases in found.items() if cases and not _is_part(name, items)}
    if unknown:
        raise pytest.UsageError(f"@pytest.mark.always names cases that do not exist: {unknown}")


def _is_part(function: str, items: Sequence[pytest.Item]) -> bool:
    """Whether single cases of a function were asked for, so that the others were not collected."""
    return any("[" in str(word) and function in str(word) for word in items[0].config.args)


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests: each commit draws others, and `make test-long` runs all. Every file keeps some quick ones, and a
    folder half of the slow ones that its files draw. Every promise and every list of all verbs, messages or sources is
    whole."""
    commit = find_commit(config.rootpath)
    folders = tuple(f"{folder}/" for folder in config.getini("sampled_folders"))
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    alike: dict[tuple[str, int], list[str]] = {}  # functions of a file of which the same share is taken
    for function, cases in functions.items():
        share = find_share(cases, is_sampled=function.startswith(folders))
        alike.setdefault((function.partition("::")[0], share), []).append(function)
    drawn, slow = list[str](), dict[str, list[str]]()
    for (file, share), names in alike.items():
        some = draw(names, -(-len(names) // share), commit)
        (slow.setdefault(file.rpartition("/")[0], []) if share == SLOW_SHARE else drawn).extend(some)
    for names in slow.values():
        drawn += draw(names, -(-len(names) // 2), commit)
    taken = set[pytest.Item]()
    for name in drawn:
        cases = {item.nodeid: item for item in functions[name]}
        taken |= {cases[case] for case in draw(cases, count_sampled(len(cases)), commit)}
    gone = [item for item in items if item not in taken]
    items[:] = [item for item in items if item in taken]
    config.hook.pytest_deselected(items=gone)


def find_share(cases: Sequence[pytest.Item], *, is_sampled: bool) -> int:
    """Return of how many such functions one is drawn."""
    names = {mark.name for item in cases for mark in item.iter_markers()}
    if names & {"promise", "inventory"}:
        return 1
    if names & {"slow", "always", "xdist_group"}:  # tests of a group share an engine, a folder or trainings
        return SLOW_SHARE
    return QUICK_SHARE if is_sampled else 1


def draw(names: Iterable[str], number: int, commit: str) -> list[str]:
    """Return so many of some names, which another commit draws anew."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{commit} {name}".encode()).digest())[:number]


def count_sampled(cases: int) -> int:
    """Return how many of a test's cases a sample has: all up to 3, and an eighth of the others."""
    return min(cases, 3 + max(0, cases - 3) // 8)


def find_commit(root: Path) -> str:
    """Return the commit that is checked out; of a copy without a history, nothing."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    done = subprocess.run(asked, check=False, capture_output=True, text=True)
    return done.stdout.strip()
