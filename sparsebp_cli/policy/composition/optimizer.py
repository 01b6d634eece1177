"""Find optimizers by name without importing torch: the entry-point group ``sparsebp.optimizers``, and torch.optim.

Recipes are checked on machines without a GPU and before torch is loaded. So an entry point names an
:class:`OptimizerEntry`, which declares the arguments of the class. For PyTorch's own, this module reads the source.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.policy.shelf import OPTIMIZERS, REMOVED_OPTIMIZERS, tell_moved

GROUP = "sparsebp.optimizers"
# In torch.optim: SparseAdam accepts only sparse gradients, which no training here produces, and Muon only matrices.
UNFIT = ("SparseAdam", "Muon")


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer for recipes: how to create it and what it supports."""

    place: str  # ``module:class``; a ``torch.optim.Optimizer`` whose ``step`` works without a closure
    arguments: tuple[str, ...]  # names that ``training.optim_args`` may give: all but the parameters and ``lr``
    # arguments that the entry's name implies; ``optim_args`` may override them
    implied: Mapping[str, object] = field(default_factory=dict)
    # a package that it needs, and the extra that installs it (of this or another distribution); None: nothing
    extra: tuple[str, str] | None = None
    # whether each state tensor has its parameter's shape or is a number, and is created at the first step: only then
    # can weights be sharded (``target.sharding: fsdp2``)
    is_sharded: bool = False
    # whether its class takes the model instead of the parameters
    takes_model: bool = False
    # whether it updates the second factors of low-rank adapters, whose first factors are frozen
    of_adapters: bool = False
    # whether it keeps moments in the projection that an activation-saving policy keeps for several steps
    of_projections: bool = False


def list_optimizers() -> list[str]:
    """Return every allowed name of ``training.optim`` on this machine, sorted."""
    installed = entry_points(group=GROUP).names
    return sorted({*installed, *_torch_classes()})


def find_optimizer(name: str) -> OptimizerEntry:
    """Return an optimizer's entry. An entry point takes precedence over a torch.optim class of the same name. Raise
    :class:`UsageError` for an unknown name or a broken plug-in."""
    found = {entry.value: entry for entry in entry_points(group=GROUP).select(name=name)}
    if len(found) > 1:
        raise UsageError(f"{name!r} is registered by more than one package: {' and '.join(sorted(found))}")
    for value, entry in found.items():
        try:
            loaded = entry.load()
        except Exception as error:  # a plugin may fail in any way
            raise UsageError(
                f"{name!r} is broken: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from None
        if not isinstance(loaded, OptimizerEntry):
            raise UsageError(f"{name!r} is broken: {value} must be an OptimizerEntry")
        return loaded
    if name in REMOVED_OPTIMIZERS:
        raise UsageError(f"{name!r} was removed after 0.5: {REMOVED_OPTIMIZERS[name]}")
    if home := tell_moved(name, OPTIMIZERS):
        raise UsageError(f"{name!r} is not installed: {home}")
    if name in _torch_classes():
        return find_in_torch(name)
    names = list_optimizers()
    raise UsageError(f"got {name!r}, allowed: {', '.join(names)}{did_you_mean(name, names)}")


def find_in_torch(name: str, *, is_sharded: bool = False) -> OptimizerEntry:
    """Return the entry of a torch.optim class. Its arguments are read from its source."""
    file, class_name = _torch_classes()[name]
    return OptimizerEntry(f"torch.optim:{class_name}", _arguments(file, class_name), is_sharded=is_sharded)


@cache
def _torch_classes() -> dict[str, tuple[Path, str]]:
    """Return torch.optim's classes by lower-case name: the file and the class name."""
    spec = find_spec("torch")  # a top-level package: this imports nothing
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "optim"
    found = {}
    for node in _parse(folder / "__init__.py").body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.optim."):
            file = folder / f"{(node.module or '').removeprefix('torch.optim.')}.py"
            for alias in node.names:
                if alias.name in ("Optimizer", *UNFIT):
                    continue
                if file.is_file() and _steps_without_closure(file, alias.name):
                    found[alias.name.lower()] = (file, alias.name)
    return found


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _method(file: Path, class_name: str, method: str) -> ast.FunctionDef | None:
    for node in _parse(file).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method), None)
    return None


def _steps_without_closure(file: Path, class_name: str) -> bool:
    """Return whether a step needs only gradients. LBFGS, in contrast, recomputes the loss in every step."""
    step = _method(file, class_name, "step")
    if step is None:  # inherited, as in AdamW
        return _method(file, class_name, "__init__") is not None
    return len(step.args.defaults) == len(step.args.args) - 1


def _arguments(file: Path, class_name: str) -> tuple[str, ...]:
    made = _method(file, class_name, "__init__")
    names = [] if made is None else [argument.arg for argument in (*made.args.args, *made.args.kwonlyargs)]
    return tuple(name for name in names if name not in ("self", "params", "lr"))
