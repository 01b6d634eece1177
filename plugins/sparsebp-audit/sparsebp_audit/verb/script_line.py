"""Add the line of `lossless` to a script with a trainer of transformers or trl.

This works only if there is exactly one place for it; every other byte of the script stays unchanged.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparsebp_audit.report import LOSSLESS_ADVICE, LOSSLESS_REFUSED, AuditReport
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.run import durable

LIBRARIES = {"transformers", "trl"}
OURS = "sparsebp_cli"
BY_HAND = "write by hand, after the line that creates the trainer"
ATTACH = 'engine = sbp.attach(model, "lossless", optimizer=optimizer)'
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class ScriptChange:
    """A script before and after the change."""

    file: Path
    before: bytes
    after: bytes
    encoding: str

    def diff(self) -> str:
        """Return the change as a unified diff."""
        old, new = (_split(content.decode(self.encoding)) for content in (self.before, self.after))
        lines = difflib.unified_diff(
            [line.rstrip("\r\n") for line in old],
            [line.rstrip("\r\n") for line in new],
            str(self.file),
            str(self.file),
            lineterm="",
        )
        return "\n".join(lines)

    def write(self) -> Path:
        """Write the script, and return the path of the old one. Raises ``UsageError`` if a file has that name, or if
        writing fails; the script is then unchanged."""
        kept = self.file.with_name(f"{self.file.name}.orig")
        try:
            if not durable.write_new(kept, self.before):
                raise UsageError(f"--write saves the old script as {kept}, but this file exists already: move it away")
            with durable.replacing(self.file) as stream:
                os.fchmod(stream.fileno(), stat.S_IMODE(self.file.stat().st_mode))
                stream.write(self.after)
        except OSError as error:
            raise UsageError(f"{self.file} could not be written: {error.strerror}") from None
        return kept


def find_objection(report: AuditReport) -> str:
    """Return why the line would not help a training, by its audit; empty if it helps."""
    applied = report.applied
    plain, light = (None, None) if applied is None else (applied.plain, applied.lossless)
    if applied and plain and light and light.median_seconds >= plain.median_seconds:
        return f"steps with lossless were not faster: {applied.times()}"
    if any(finding.advice.endswith(LOSSLESS_ADVICE) for finding in report.findings):
        return ""
    refusals = [note for note in report.notes if note.startswith(LOSSLESS_REFUSED)]
    return refusals[0] if refusals else f"lossless would save less than {report.threshold:.1%} of a step"


def find_change(file: Path) -> ScriptChange:
    """Return the change of a script. Raises ``UnsupportedError``, with the line to write by hand, if the script has no
    place for it, or several."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        raise UnsupportedError(f"{file} belongs to an installed package; {_by_hand()}")
    try:
        before = file.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(before).readline)
        lines, tree = _split(before.decode(encoding)), ast.parse(before)
    except OSError as error:
        raise UnsupportedError(f"{file} could not be read: {error.strerror}; {_by_hand()}") from None
    except (SyntaxError, ValueError) as error:
        raise UnsupportedError(f"{file} is no script that Python can parse ({error}); {_by_hand()}") from None
    place = _find_place(file.name, tree)
    module = OURS if _uses(tree, "sbp") else "sbp"
    added = {
        place.imported: f"import {OURS}" if module == OURS else f"import {OURS} as sbp",
        place.made: f'{module}.PolicyCallback("lossless").join({place.name})',
    }
    for statement in sorted(added, key=lambda node: node.lineno, reverse=True):
        _insert(file.name, lines, statement, added[statement])
    return ScriptChange(file, before, "".join(lines).encode(encoding), encoding)


def describe_change(file: Path | None) -> list[tuple[str, str]]:
    """Return who adds a line to a script and where, and the line, for each: ``--write``, or the user if it cannot."""
    try:
        added = [] if file is None else find_change(file).diff().splitlines()[2:]
    except UnsupportedError:
        added = []
        if file is not None and (loop := _find_loop(file)) is not None:
            return [
                ("write by hand, before the loop", f"import {OURS} as sbp; {ATTACH}"),
                (f"in place of the call in line {loop[0]} of {file.name}", loop[1]),
            ]
    line = "; ".join(line[1:].strip() for line in added if line.startswith("+"))
    return [(f"`--write` puts into {file}", line) if line else (BY_HAND, _write_call("trainer"))]


def _by_hand(name: str = "trainer") -> str:
    return f"{BY_HAND}: {_write_call(name)}"


def _write_call(name: str) -> str:
    return f'import {OURS} as sbp; sbp.PolicyCallback("lossless").join({name})'


def _split(text: str) -> list[str]:
    """Return lines with their ends, as Python splits them: a form feed ends none."""
    return list(io.StringIO(text, newline=""))


def _insert(name: str, lines: list[str], statement: ast.stmt, added: str) -> None:
    """Insert a line after a statement, with its indentation and line end."""
    first, last = lines[statement.lineno - 1], lines[(statement.end_lineno or statement.lineno) - 1]
    indentation = first.encode()[: statement.col_offset].decode()
    rest = last.encode()[statement.end_col_offset :].decode().strip()
    end = last[len(last.rstrip("\r\n")) :]
    if indentation.strip() or (rest and not rest.startswith("#")) or not end:
        raise UnsupportedError(f"{name}:{statement.lineno} has several statements in one line; {_by_hand()}")
    lines.insert(statement.end_lineno or statement.lineno, f"{indentation}{added}{end}")


def _uses(tree: ast.Module, name: str) -> bool:
    names = (getattr(node, attribute, None) for node in ast.walk(tree) for attribute in ("id", "arg", "asname", "name"))
    return name in names


@dataclass(frozen=True)
class ScriptPlace:
    """The place where a script creates its one trainer."""

    name: str  # name of the variable
    imported: ast.stmt  # the import of the trainer's class, or of the class that it extends
    made: ast.stmt


@dataclass
class _Uses:
    """How one scope uses its names."""

    made: list[tuple[ast.stmt, ast.Call]] = field(default_factory=list)  # calls of a trainer's class
    bound: list[str] = field(default_factory=list)  # once for each binding
    trained: list[tuple[str, int]] = field(default_factory=list)  # NAME.train(), by line


def _find_place(file: str, tree: ast.Module) -> ScriptPlace:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if any(module.partition(".")[0] == OURS for module in modules):
            raise UnsupportedError(f"{file}:{node.lineno} imports {OURS} already; nothing was written")
    classes = _Classes(tree, imports)
    scopes = [uses for scope in _walk_scopes(tree) for uses in [_read_scope(scope, classes)] if uses.made]
    made = [(statement, call) for uses in scopes for statement, call in uses.made]
    if len(made) != 1:
        raise UnsupportedError(f"{file} {_count(tree, [call.lineno for _, call in made])}: {_by_hand()}")
    [(statement, call)], [uses] = made, scopes
    name = _assigned(statement, call)
    where = f"{file}:{call.lineno}"
    if name is None:
        raise UnsupportedError(f"{where} creates a trainer without assigning it to a variable; {_by_hand()}")
    if uses.bound.count(name) != 1:
        raise UnsupportedError(f"{where}: {name} is assigned more than once in the same scope; {_by_hand(name)}")
    if not any(other == name and line > statement.lineno for other, line in uses.trained):
        raise UnsupportedError(
            f"{where} creates {name}, but the same scope does not call {name}.train() after it; {_by_hand(name)}"
        )
    imported = list(dict.fromkeys(classes.find(call.func)))  # a class that extends one of the same name has it twice
    if len(imported) != 1:
        lines = " and ".join(map(str, sorted(node.lineno for node in imported)))
        raise UnsupportedError(
            f"{where}: the class of {name} is imported more than once, in lines {lines}; {_by_hand(name)}"
        )
    return ScriptPlace(name, imported[0], statement)


def _count(tree: ast.Module, lines: list[int]) -> str:
    if lines:
        return f"creates {len(lines)} trainers, in lines {', '.join(map(str, lines))}"
    if (found := _find_backward(tree)) is not None:
        return (
            f"creates no trainer of transformers or trl; for its own training loop, write by hand {ATTACH} before the "
            f"loop and {found[1]} in line {found[0]}; for a trainer"
        )
    return "creates no trainer of transformers or trl"


def _find_backward(tree: ast.Module) -> tuple[int, str] | None:
    """Return the line of the first ``LOSS.backward()``, and the call that takes its place."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.args:
            continue  # with an argument it is another's, such as an accelerator's
        if node.func.attr == "backward":
            return node.lineno, f"engine.backward({ast.unparse(node.func.value)})"
    return None


def _find_loop(file: Path) -> tuple[int, str] | None:
    """Return the backward pass of a script that makes no trainer; None if it makes one, or cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    classes = _Classes(tree, [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)])
    return None if any(_read_scope(scope, classes).made for scope in _walk_scopes(tree)) else _find_backward(tree)


def _assigned(statement: ast.stmt, call: ast.Call) -> str | None:
    """Return the name to which a statement assigns a call's result; None for other statements."""
    target: ast.expr | None = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    is_whole = isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is call
    return target.id if is_whole and isinstance(target, ast.Name) else None


class _Classes:
    """Names in a script for a trainer's class, or for a library with one, and their imports."""

    def __init__(self, tree: ast.Module, imports: list[ast.Import | ast.ImportFrom]) -> None:
        self._classes: dict[str, list[ast.stmt]] = {}
        self._modules: dict[str, list[ast.stmt]] = {}
        for node in imports:
            for alias in node.names:
                is_module = isinstance(node, ast.Import)
                # `from .x import` refers to the script's own folder, whatever its name.
                source = alias.name if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
                library = source.partition(".")[0]
                if library in LIBRARIES and is_module:
                    self._modules.setdefault(alias.asname or library, []).append(node)
                elif library in LIBRARIES and alias.name.endswith("Trainer"):
                    self._classes.setdefault(alias.asname or alias.name, []).append(node)
        for made in ast.walk(tree):
            # In the script's order, to find a class that extends one of the script's own.
            if isinstance(made, ast.ClassDef):
                for base in made.bases:
                    self._classes.setdefault(made.name, []).extend([*self.find(base)])
        self._classes = {name: nodes for name, nodes in self._classes.items() if nodes}

    def find(self, expression: ast.expr) -> list[ast.stmt]:
        """Return the imports behind an expression that is a trainer's class; none for other expressions."""
        if isinstance(expression, ast.Name):
            return self._classes.get(expression.id, [])
        if not isinstance(expression, ast.Attribute) or not expression.attr.endswith("Trainer"):
            return []
        root: ast.expr = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        return self._modules.get(root.id, []) if isinstance(root, ast.Name) else []


def _walk_scopes(tree: ast.Module) -> Iterator[Scope]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Scope))


def _read_scope(scope: Scope, classes: _Classes) -> _Uses:
    """Return a scope's own uses; functions and classes in it are separate scopes."""
    uses = _Uses()

    def read(node: ast.AST, statement: ast.stmt | None) -> None:
        for child in ast.iter_child_nodes(node):
            own = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.Call) and own is not None:
                if classes.find(child.func):
                    uses.made.append((own, child))
                function = child.func
                is_train = isinstance(function, ast.Attribute) and function.attr == "train"
                if is_train and isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                    uses.trained.append((function.value.id, child.lineno))
            if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
                uses.bound.append(child.id)
            if not isinstance(child, Scope):
                read(child, own)

    read(scope, None)
    return uses
