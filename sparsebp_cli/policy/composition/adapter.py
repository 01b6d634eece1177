"""List peft's methods by type, with their option names, without importing peft, which loads torch.

A recipe is checked before anything heavy is loaded. So this reads peft's source, as for PyTorch's optimizers.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# The types that tests train, merge and load. Other types need what a run does not have: task ids, a call after each
# step, or virtual tokens; pvera draws noise. LoRA has its own section.
ADAPTER_TYPES = (
    *("boft", "c3a", "delora", "fourierft", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "miss"),
    *("oft", "randlora", "road", "shira", "trainable_tokens", "vblora", "vera"),
)

# By type of quantisation: the types above whose code in peft 0.21 reads the base's weights as plain numbers.
READERS: dict[str, tuple[str, ...]] = {
    "nf4": ("delora", "hra", "loha", "lokr"),
    "fp4": ("delora", "hra", "loha", "lokr"),
    "int8": ("delora", "hira", "hra"),
}

# Fields of an adapter's config about its base or its history; recipes state these elsewhere.
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
    """Return the option names of a peft method: the fields of its config class. Empty for a type that the installed
    peft does not have."""
    folder = _tuners()
    if folder is None or not (folder / adapter_type / "config.py").is_file():
        return ()
    classes = _list_classes(folder)
    config = _find_config(folder / adapter_type / "__init__.py")
    return tuple(sorted(_list_fields(config, classes) - NOT_OPTIONS))


def _tuners() -> Path | None:
    spec = find_spec("peft")  # a top-level package: this imports nothing
    return Path(spec.origin).parent / "tuners" if spec is not None and spec.origin is not None else None


def _find_config(file: Path) -> str:
    """Return the name of the config class with which a peft package registers its method."""
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
