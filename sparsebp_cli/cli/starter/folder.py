"""Make the starter folder: a dense recipe, one with a policy, named targets, a new policy, and a README."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path

from sparsebp_cli.cli.starter.package import make_package
from sparsebp_cli.cli.starter.template import fill
from sparsebp_cli.errors import SparseBPError, UsageError

OWN_MODEL = "austen-llama"
# Columns of a row, in the order in which ``--columns`` names them.
WANTED = {"completion": ("prompt", "completion"), "chat": ("messages",), "text": ("text",)}
WANTED |= {"classification": ("text", "label"), "glue": ("sentence1", "sentence2", "label")}
# Columns of GLUE's pairs in MRPC, RTE, STS-B and WNLI; other tasks use other names.
OF_GLUE = ("sentence1", "sentence2", "label")
DATA = {"completion": "cmudict", "chat": "cmudict", "text": "python-docs"}
LENGTH = {"completion": 64, "chat": 96, "text": 128, "classification": 128, "glue": 128}
LENGTH_OF_OWN_CHATS = 1024
ROWS_READ = 1000  # of the data, to find its columns: some rows may lack one, as Alpaca's without an input
BATCH = {"completion": 32, "chat": 32, "text": 16, "classification": 16, "glue": 16}
COLUMNS = {
    "completion": "columns prompt and completion: only the completion is trained",
    "chat": "column messages, with role and content: the assistant's messages are trained",
    "text": "column text: packed into blocks of max_seq_length",
    "classification": "columns text and label: one label for each text",
    "glue": "columns sentence1, sentence2 and label, splits train and validation: one label for each pair of texts",
}
# Without padding and prompts nothing can be skipped exactly, so plain texts get a policy that selects.
SECOND = {
    "completion": ("lossless", "policy: lossless", "the dense gradient, computed without padding or head at prompts"),
    "chat": ("lossless", "policy: lossless", "the dense gradient, computed without padding or head at user turns"),
    "text": (
        "random-rows",
        "policy:\n  - name: random\n    keep: 0.25\n    along: rows",
        "a quarter of the token rows of each gradient, drawn at random",
    ),
    "classification": ("lossless", "policy: lossless", "the dense gradient, computed without padding"),
    "glue": ("lossless", "policy: lossless", "the dense gradient, computed without padding"),
}


class Task(StrEnum):
    """The task that the model learns from a row of data."""

    COMPLETION = "completion"
    CHAT = "chat"
    TEXT = "text"
    CLASSIFICATION = "classification"
    GLUE = "glue"


def default_data(task: Task) -> str | None:
    """Return the packaged data for a task; None if there are none."""
    return DATA.get(task.value)


def name_columns(task: Task, names: Sequence[str]) -> dict[str, object]:
    """Return the ``dataset`` keys for columns in the order of a task. Raise UsageError if their number is wrong."""
    if task is Task.CHAT and len(names) == 1:
        return {"columns": {"messages": names[0]}}
    if task is Task.CHAT and len(names) == 2:
        return {"columns": dict(zip(("user", "assistant"), names, strict=True))}
    wanted = WANTED[task.value]
    if task is Task.CHAT or len(names) != len(wanted):
        raise UsageError(f"--columns for --task {task} needs {COLUMNS[task]}; got {len(names)}: {','.join(names)}")
    if task is Task.GLUE:
        return {"columns": {"text": list(names[:2]), "label": names[2]}}
    renamed = {part: name for part, name in zip(wanted, names, strict=True) if part != name}
    return {"columns": renamed} if renamed else {}


def _read_names(data: str) -> dict[str, None]:
    """Return the columns of the first rows, in order; none if the data are not on this machine or not readable."""
    from sparsebp_cli.recipe.schema import DatasetSection
    from sparsebp_cli.source import DATASETS, find_source
    from sparsebp_cli.source.split import find_splits, take_rows

    try:
        if not isinstance(find_source(data, DATASETS), Path) and data not in DATA.values():
            return {}
        section = DatasetSection(name=data)
        rows = take_rows(find_splits(section), section.split, ROWS_READ)
    except SparseBPError:
        return {}  # checking the recipes reports what is wrong
    return dict.fromkeys(name for row in rows for name in row)


def find_columns(task: Task, data: str, names: Collection[str]) -> dict[str, object]:
    """Return the ``dataset`` keys for columns with usual names, guessed from the names of all columns."""
    from sparsebp_cli.source.column import find_readings

    if not names:
        return {}
    for keys in find_readings(names):
        if keys["format"] == task.value:
            return {name: value for name, value in keys.items() if name != "format"}
    if set(names) >= set(WANTED[task.value]):
        return {}
    raise UsageError(f"{data} has the columns {', '.join(names)}; {_advise(task, names)}")


def _advise(task: Task, names: Collection[str]) -> str:
    """Return what to do if data have other columns than a task."""
    from sparsebp_cli.source.column import find_readings

    if {"chosen", "rejected"} <= set(names):
        return "recipes do not train on preferences: use trl's DPOTrainer with sparsebp_cli.PolicyCallback"
    for other in (keys["format"] for keys in find_readings(names) if keys["format"] in list(Task)):
        return f"for these columns, give --task {other}"
    meant = {"chat": "USER,ASSISTANT"}.get(task.value, ",".join(WANTED[task.value]).upper())
    return f"--task {task} needs {' and '.join(WANTED[task.value])}: name the columns by --columns {meant}"


def make_starter(
    folder: Path, task: Task, model: str, data: str | None, columns: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the files of a starter folder by their paths in it.

    Args:
        folder: Path of the folder. Its name is the prefix of the policy's name.
        task: What the model learns from a row of data, such as ``chat``.
        model: An installed name, a hub id, or a path.
        data: An installed name, a hub id, or a path; None for the packaged data of the task.
        columns: Names of the columns in the order of the task; None to guess usual names from the data.

    Returns:
        Texts by file name.

    Raises:
        UsageError: The task has no packaged data and ``data`` is None, or the number of columns is wrong.
    """
    data = data if data is not None else default_data(task)
    if data is None:
        raise UsageError(f"--task {task} needs --data: a file, a folder or an id of the hub ({COLUMNS[task]})")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    policy = f"{name}-rows" if name[:1].isalpha() else "own-rows"
    from sparsebp_cli.source.column import write_keys

    second, section, what = SECOND[task]
    is_own = model == OWN_MODEL
    more, length = [], LENGTH[task]
    if task is Task.CHAT and is_own:
        more.append("chat_template: chat.jinja  # leave it out for a model that has its own")
    if task is Task.CHAT and data != default_data(task) and not is_own:
        length = LENGTH_OF_OWN_CHATS
    names = _read_names(data)
    # Spaces around a name belong to it only if the data have such a column.
    given = [name if name in names else name.strip() for name in columns or (OF_GLUE if task is Task.GLUE else ())]
    keys = name_columns(task, given) if given else find_columns(task, data, names)
    found = "" if given else "  # found in the data"
    more += [f"{write_keys({key: value})}{found}" for key, value in keys.items()]
    held_out = "eval_split: validation" if task is Task.GLUE else "eval_fraction: 0.1"
    words = {
        "task": "classification" if task is Task.GLUE else task.value,
        "model": _quote(model),
        "data": _quote(data),
        "columns": COLUMNS[task].partition(": ")[2] if keys else COLUMNS[task],
        "more": "".join(f"\n  {line}" for line in more),
        "length": str(length),
        "batch": str(BATCH[task]),
        "held_out": "eval_split: test" if data == default_data(task) else held_out,
        "learning_rate": "1e-3" if is_own else "5e-5",
        "second": second,
        "section": section,
        "what": what,
        "policy": policy,
        "environment": describe_environment(Path(sys.prefix), is_virtual=sys.prefix != sys.base_prefix),
    }
    files = {f"policy/{path}": text for path, text in make_package(policy).items()}
    if task is Task.CHAT and is_own:
        files["chat.jinja"] = fill("folder/chat.jinja", **words)
    return files | {
        "dense.yaml": fill("folder/dense.yaml", **words),
        f"{second}.yaml": fill("folder/second.yaml", **words),
        "targets.yaml": fill("folder/targets.yaml", **words),
        "README.md": fill("folder/README.md", **words),
    }


def describe_environment(prefix: Path, *, is_virtual: bool) -> str:
    """Return how to activate the virtual environment in which SparseBP is installed. Return an empty text without such
    an environment, or if it is activated in another way, as in conda."""
    script = prefix / "bin" / "activate"
    if not (is_virtual and script.is_file()):
        return ""
    lines = (
        "",
        "The commands need this virtual environment:",
        "",
        "```console",
        f"$ . {shlex.quote(str(script))}",
        "```",
        "",
    )
    return "\n".join(lines)


def _quote(name: str) -> str:
    """Return a name as YAML text: plain if that is certainly valid, else as JSON."""
    return name if re.fullmatch(r"[A-Za-z][\w./-]*", name) else json.dumps(name, ensure_ascii=False)
