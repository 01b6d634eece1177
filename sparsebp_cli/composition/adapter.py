"""Methods of peft by their types and the names of their options, without importing peft, which loads torch.

As with PyTorch's optimizers, the source is read: a recipe is checked before anything heavy is loaded.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# The types that tests train, merge and load; the others need what a run does not have: task ids, a call after each
# step, virtual tokens; pvera draws noise. LoRA has a section of its own.
ADAPTER_TYPES = (
    *("boft", "c3a", "delora", "fourierft", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "miss"),
    *("oft", "randlora", "road", "shira", "trainable_tokens", "vblora", "vera"),
)

# Of these, the ones whose code in peft 0.21 reads the weights of the base as plain numbers, by type of quantisation.
READERS: dict[str, tuple[str, ...]] = {
    "nf4": ("delora", "hra", "loha", "lokr"),
    "fp4": ("delora", "hra", "loha", "lokr"),
    "int8": ("delora", "hira", "hra"),
}

# What an adapter's config says of its base and of its own history, which a recipe says elsewhere.
NOT_OPTIONS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)


@cache
def find_adapter_options(adapter_type: str) -> tuple[str, ...]:
    """Return the options of a method of peft, which are the fields of its config class. Empty for a type that the
    installed peft does not have."""
    folder = _tuners()
    if folder is None or not (folder / adapter_type / "config.py").is_file():
        return ()
    classes = _list_classes(folder)
    config = _find_config(folder / adapter_type / "__init__.py")
    return tuple(sorted(_list_fields(config, classes) - NOT_OPTIONS))


def _tuners() -> Path | None:
    spec = find_spec("peft")  # of a package at the top, this imports nothing
    return Path(spec.origin).parent / "tuners" if spec is not None and spec.origin is not None else None


def _find_config(file: Path) -> str:
    """Return the name of the config class that a package registers its method with."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register_peft_method":
            for keyword in node.keywords:
                if keyword.arg == "config_cls" and isinstance(keyword.value, ast.Name):
                    return keyword.value.id
    return ""


@cache
def _list_classes(folder: Path) -> dict[str, ast.ClassDef]:
    files = [folder.parent / "config.py", *folder.glob("*.py"), *folder.glob("*/config.py")]
    nodes = (node for file in files for node in ast.parse(file.read_bytes()).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _list_fields(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the fields of a dataclass and of its bases."""
    node = classes.get(name)
    if node is None:
        return set()
    own = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return own.union(*(_list_fields(base.id, classes) for base in node.bases if isinstance(base, ast.Name)))
