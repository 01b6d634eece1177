"""The tiers of tests: fast, ordinary, long.

The fast tier, ``pytest --fast``, is the files that ``fast_files`` in pyproject.toml names; none of them trains a model.
What makes it fast is held, not hoped for: in a session with ``--fast`` an import of transformers, of what stands on it,
or of MLflow fails in the process of the tests. Tests of these files that need one all the same are marked ``model``;
those and the slow ones are left to the ordinary run. What a test starts as a process of its own is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

HEAVY = frozenset({"accelerate", "datasets", "mlflow", "peft", "torchao", "transformers"})
LEFT_OUT = ("slow", "model", "compiles")
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
    """Add ``--fast`` and the list that it reads."""
    parser.addoption("--fast", action="store_true", help="only the files of fast_files, without transformers")
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
