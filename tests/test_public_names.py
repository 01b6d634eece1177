"""What is public can be imported, is documented, and is known to type checkers by its own type."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import sparsebp_audit
import sparsebp_cli as sbp
from sparsebp_cli import errors
from sparsebp_cli.policy.shelf import HOMES
from tests.docs.block import blocks
from tests.plugin import PLUGINS, SHELF_TESTS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from generator import public  # noqa: E402

PUBLIC = public.find_public()

MISTAKES = """\
from torch import nn
import sparsebp_cli as sbp
import sparsebp_cli.testing as testing

model = nn.Linear(2, 2)
sbp.atach(model, [])
sbp.attach(model, [], sites="lineras")
sbp.attach(model, [], eager_clip="exakt", update="eager")
sbp.attach(model, [], execution="fast", checkpointing="ful", reference="batch")
sbp.make_polisy
sbp.make_policy(3)
testing.check_polisy
testing.check_policy(3)
try:
    sbp.make_policy("topk", keep=0.5)
except sbp.UsageError:
    pass
"""


def test_every_error_is_exported() -> None:
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    known = {n for n, c in classes.items() if issubclass(c, Exception) and c.__module__ == errors.__name__}
    assert {name for name in sbp.__all__ if name.endswith("Error")} == known
    assert sbp.DivergedError is errors.DivergedError


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_can_be_imported_and_is_documented(module: str) -> None:
    assert [name for name in PUBLIC[module] if not hasattr(import_module(module), name)] == []
    assert PUBLIC[module] == sorted(PUBLIC[module], key=str.swapcase) or PUBLIC[module] == sorted(PUBLIC[module])
    page = public.page(ROOT)
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (.+) \|$", page.partition(f"## `{module}`\n")[2].partition("\n## ")[0], re.MULTILINE
        )
    )
    assert list(rows) == PUBLIC[module]
    assert [name for name, meaning in rows.items() if len(meaning) < 10] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_types(module: str) -> None:
    functions = [
        part
        for found in (getattr(import_module(module), name) for name in PUBLIC[module])
        for part in [found, *(vars(found).values() if inspect.isclass(found) else ())]
        if inspect.isfunction(part) and not part.__name__.startswith("_")
    ]
    assert [function.__qualname__ for function in functions if _lacks_types(function)] == []


def test_the_page_on_stability_leads_to_the_list() -> None:
    text = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    assert "(public.md)" in text


def test_example_plugins_and_the_guide_use_public_names_only() -> None:
    # The shelf's own tests look inside, as ours do; and so do these packages, until what they need has a public name.
    inside = SHELF_TESTS, *(PLUGINS / f"sparsebp-{name}" for name in ("audit", "lab", "tools"))
    files = [file for file in PLUGINS.rglob("*.py") if not any(map(file.is_relative_to, inside))]
    files += (PLUGINS / "sparsebp-tools" / "sparsebp_tools" / "memory").glob("*.py")
    files += (ROOT / "tests" / "plugins").rglob("*.py")
    pieces = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    pieces |= {block.place: block.text for block in blocks("python")}
    assert len(pieces) > 30
    private = {place: names for place, text in pieces.items() if (names := _find_private(text))}
    assert private == {}


@pytest.mark.parametrize(
    "line",
    [
        "from sparsebp_cli.target.engine import TargetEngine",
        "from sparsebp_cli.run.journal import FILE",
        "from sparsebp_cli.policy import hidden_state",
        "import sparsebp_cli.worker",
        "import sparsebp_cli as sbp\nsbp.worker.train()",
    ],
)
def test_a_use_of_a_private_name_is_found(line: str) -> None:
    assert _find_private(line) != []


def test_names_that_moved_lead_to_their_package_with_a_warning() -> None:
    from sparsebp_cli import auditor, memory

    for module in (auditor, memory):
        for name, home in module.HOMES.items():
            with pytest.warns(FutureWarning, match=f"{name} has moved: import it from {home}"):
                assert getattr(module, name) is getattr(import_module(home), name)
        # As a program of 0.5 imports it: before anything else of the package.
        program = f"import {module.__name__}\nprint(sorted({module.__name__}.HOMES))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(sorted(module.HOMES))
    with pytest.warns(FutureWarning, match="has moved"):
        assert sbp.audit is sparsebp_audit.audit
    with pytest.warns(FutureWarning, match="has moved"):
        assert sbp.memory_trace is import_module("sparsebp_tools.memory").memory_trace


@pytest.mark.parametrize("name", HOMES)
def test_a_name_of_0_5_leads_to_the_shelf_with_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = import_module("sparsebp_cli.policy")
    with pytest.warns(FutureWarning, match=f"{name} has moved: import it from {HOMES[name]}"):
        assert getattr(policy, name) is getattr(import_module(HOMES[name]), name)
    monkeypatch.setitem(sys.modules, HOMES[name], None)
    monkeypatch.setitem(sys.modules, "sparsebp_shelf", None)
    with pytest.raises(ModuleNotFoundError, match="in the package sparsebp-shelf: python -m pip install"):
        getattr(policy, name)


def test_a_name_that_moved_says_which_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparsebp_audit", None)
    line = "audit is in the package sparsebp-audit: python -m pip install sparsebp-audit"
    with pytest.raises(ModuleNotFoundError, match=f"^{line} \\(in a checkout"):
        sbp.audit  # noqa: B018
    monkeypatch.setitem(sys.modules, "sparsebp_tools.memory", None)
    line = "memory_trace is in the package sparsebp-tools: python -m pip install sparsebp-tools"
    with pytest.raises(ModuleNotFoundError, match=f"^{line} \\(in a checkout"):
        sbp.memory_trace  # noqa: B018


def _lacks_types(function: Callable[..., object]) -> bool:
    signature = inspect.signature(function)
    parameters = [each.annotation for name, each in signature.parameters.items() if name not in {"self", "cls"}]
    return inspect.Signature.empty in [*parameters, signature.return_annotation]


def _find_private(text: str) -> list[str]:
    """Return what a piece of Python uses of SparseBP beside the public names."""
    found, package = [], set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == sbp.__name__:
            names = PUBLIC.get(node.module or "", [])
            found += [f"{node.module}.{each.name}" for each in node.names if each.name not in names]
        elif isinstance(node, ast.Import):
            ours = [each for each in node.names if each.name.partition(".")[0] == sbp.__name__]
            found += [each.name for each in ours if each.name not in PUBLIC]
            package |= {each.asname for each in ours if each.name == sbp.__name__ and each.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in package:
            found += [node.attr] if node.attr not in sbp.__all__ else []
    return found


@pytest.mark.types
def test_a_type_checker_finds_typos_and_wrong_choices(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(MISTAKES)
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *settings, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"script\.py:(\d+): error: (.*?)  \[([\w-]+)\]", done.stdout)
    assert [(int(line), kind) for line, _, kind in found] == [
        (6, "attr-defined"),
        (7, "arg-type"),
        (8, "arg-type"),
        (9, "arg-type"),
        (10, "attr-defined"),
        (11, "arg-type"),
        (12, "attr-defined"),
        (13, "arg-type"),
    ], done.stdout
    assert 'has no attribute "atach"' in found[0][1]
