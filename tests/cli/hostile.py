"""Hostile inputs, and the verbs that read them: ``python -m tests.cli.hostile`` prints which verb is run on which.

A row has command lines of a verb. A word in capitals in a line is something that the verb reads, and each form of its
kind stands there once. Kinds that every verb meets, such as variables of the shell, use the first line of each row.
The documentation is generated from this module, so that it imports nothing beyond the standard library at its top.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

SECRET = "hunter2-in-the-clear"
CANARY = "canary"  # a file that only foreign code would make
GIB = 1 << 30

Put = Callable[[Path], object]  # replaces the file at a path, if there is one
BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in pairwise("abcdefghijklmnopqrst"))


def write(content: str | bytes) -> Put:
    return lambda file: file.write_bytes(content.encode() if isinstance(content, str) else content)


def link(target: str) -> Put:
    return lambda file: file.symlink_to(target)


def make_holes(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(GIB)


def bind_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(file))


def link_out(file: Path) -> None:
    """A link to a file of the user's that nothing has to do with."""
    secret = next(folder for folder in file.parents if (folder / "outside").is_dir()) / "outside" / "secret"
    file.symlink_to(secret)


ANY_FILE: dict[str, Put] = {
    "a pipe": os.mkfifo,
    "without end": link("/dev/zero"),
    "a gigabyte of holes": make_holes,
    "bytes": write(bytes(range(256)) * 40),
    "not UTF-8": write("é: ü".encode("latin-1")),
    "empty": write(b""),
    "cut": write(b'{"recipe": {"name": "fa'),
    "deep": write("[" * 60_000),
    "deep objects": write('{"a":' * 60_000),
    "a folder": lambda file: file.mkdir(),
    "a link out": link_out,
    "a secret": write(SECRET),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a socket": bind_socket,
}
YAML: dict[str, Put] = {
    "a bomb of aliases": write(BOMB),
    "a constructor of Python": write(f'version: 1\nname: !!python/object/apply:os.mkdir ["{CANARY}"]\n'),
    "a merge of itself": write("a: &a\n  <<: *a\n"),
    "a line of 5 MB": write("name: " + "x" * 5_000_000),
    "escape sequences": write('name: "\\e]52;c;eA==\\a\\e[2J"\n'),
    "a secret as its base": write("base: ../outside/secret\nversion: 1\n"),
}


def zip_bomb(file: Path) -> None:
    import zipfile

    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("x.jsonl", "\n" * 20_000_000)


def parquet_bomb(file: Path) -> None:
    """One text of 100,000 letters, 400,000 times, in some kilobytes."""
    import pyarrow as pa
    import pyarrow.parquet

    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 400_000, pa.int32()), pa.array(["x" * 100_000]))
    pa.parquet.write_table(pa.table({"text": texts}), file, compression="zstd")


DATA: dict[str, tuple[str, Put]] = {
    **{form: ("data.jsonl", put) for form, put in ANY_FILE.items() if form != "a folder"},
    "an empty folder": ("data", lambda file: file.mkdir()),
    "a bomb of gzip": ("data.jsonl.gz", lambda file: file.write_bytes(
        gzip.compress(b'{"text":"' + b"a" * 80_000_000 + b'"}\n'))),
    "a bomb of Parquet": ("data.parquet", parquet_bomb),
    "a bomb of zip": ("data.zip", zip_bomb),
    "damaged Parquet": ("data.parquet", write(b"PAR1" + bytes(50) + struct.pack("<I", 0x7FFFFFFF) + b"PAR1")),
    "damaged Arrow": ("data.arrow", write(b"\xff\xff\xff\xff" + struct.pack("<I", 0x7FFFFFF0) + bytes(50))),
    "a pickle": ("data.pkl", write(b"cos\nmkdir\n(S'" + CANARY.encode() + b"'\ntR.")),
    "a script": ("data.py", write(f"import os; os.mkdir({CANARY!r})\n")),
}  # fmt: skip

CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16,
          "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip


def write_model(folder: Path) -> None:
    """A folder that looks like a model's."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def in_config(**values: object) -> Put:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | values))


def replace(name: str, put: Put) -> Put:
    """Put something in the place of one file of a folder."""

    def change(folder: Path) -> None:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        put(file)

    return change


def index_out(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "../outside/secret"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


MODEL: dict[str, Put] = {
    **{f"{name}: {form}": replace(name, put) for name in ("config.json", "tokenizer.json", "model.safetensors")
       for form, put in ANY_FILE.items()},
    "code in config.json": in_config(auto_map={"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}),
    "a billion layers": in_config(num_hidden_layers=10**9),
    "a trillion words": in_config(vocab_size=10**12),
    "an index that leads out": index_out,
}  # fmt: skip

RUN_FILES = (
    *("plan.json", "journal.jsonl", "target.json", "labels.json", "outline.json", "tracking.json", "trial.json"),
    *("worker.log", "model/config.json", "model/manifest.json", "checkpoints/step-00000003/manifest.json"),
)


def list_in_manifest(name: str, put: Put | None, size: int | None = None) -> Put:
    """The model's manifest names one more file, which may be there."""

    def change(folder: Path) -> None:
        model = folder / "model"
        listed = {name: "0" * 64}
        sizes = {} if size is None else {"bytes": {name: size}}
        (model / "manifest.json").write_text(json.dumps({"sha256": listed} | sizes))
        if put is not None:
            put(model / name)

    return change


def change_plan(**values: object) -> Put:
    """Change keys of a plan, whose parents stand before a double underscore."""

    def change(folder: Path) -> None:
        file = folder / "plan.json"
        plan = json.loads(file.read_bytes())
        for path, value in values.items():
            *parents, last = path.split("__")
            part = plan
            for key in parents:
                part = part[key]
            part[last] = value
        file.write_text(json.dumps(plan))

    return change


TEXTS = {
    "emoji": "👩\u200d🔬🚀",
    "right to left": "\u202egnp.שלום\u202c",
    "shell syntax": f"$(touch {CANARY});`touch {CANARY}`&&'\"|touch {CANARY}",
    "escape sequences": "\x1b]52;c;eA==\x07\x1b[2J",
    "several lines": "a\nerror: b\r\nc",
    "a path out": "../../outside/secret",
    "a dash": "--help=x",
    "markup": "[bold]x[/bold]<script>1</script>",
    "5,000 letters": "x" * 5000,
    "half a surrogate pair": "\udce9",
}
OFTEN = ("a pipe", "without end", "a gigabyte of holes", "bytes", "cut", "deep objects", "a link out", "a folder")
RUN: dict[str, Put] = {
    **{
        f"{name}: {form}": replace(name, ANY_FILE[form])
        for name in RUN_FILES
        for form in OFTEN
        # An event log may have 2 GiB and an output any size, so they are read to their end.
        if name not in ("journal.jsonl", "worker.log") or form != "a gigabyte of holes"
    },
    "a manifest that names a pipe": list_in_manifest("x", os.mkfifo),
    "a manifest that names /dev/zero": list_in_manifest("x", link("/dev/zero")),
    "a manifest that names a link out": list_in_manifest("x", link_out),
    "a manifest that leads out": list_in_manifest("../../../../outside/secret", None),
    "a manifest of absolute names": list_in_manifest("/etc/passwd", None),
    "a manifest that names 1 EB": list_in_manifest("x", make_holes, 10**18),
    "steps that are text": change_plan(recipe__training__max_steps="many"),
    "a date that is none": change_plan(created="yesterday"),
    "an unknown target": change_plan(recipe__target__kind="nowhere"),
    "a link to another run's model": lambda folder: [
        shutil.rmtree(folder / "model"), (folder / "model").symlink_to("/etc")
    ],
}  # fmt: skip


def label_it(text: str) -> Put:
    """Give a run this text as its tag and note."""
    return lambda folder: (folder / "labels.json").write_text(json.dumps({"tags": [text], "note": text}))


NAMES: dict[str, Put] = {
    **{f"the recipe's name: {form}": change_plan(recipe__name=text) for form, text in TEXTS.items()},
    **{f"tag and note: {form}": label_it(text) for form, text in TEXTS.items()},
}


def put_in_archive(name: str, size: int, kind: bytes = b"0") -> Put:
    """An archive with one member, whose header tells a size."""

    def make(file: Path) -> None:
        import tarfile

        member = tarfile.TarInfo(name)
        member.size, member.type, member.linkname = size, kind, "/etc/passwd"
        file.write_bytes(gzip.compress(member.tobuf(tarfile.PAX_FORMAT) + bytes(10_240)))

    return make


ARCHIVE: dict[str, Put] = {
    **ANY_FILE,
    "a bomb": lambda file: file.write_bytes(gzip.compress(bytes(60_000_000))),
    "a member that leads out": put_in_archive("runs/../../outside/secret", 0),
    "a link": put_in_archive("runs/0123456789ab/plan.json", 0, b"2"),
    "a pipe in it": put_in_archive("runs/0123456789ab/plan.json", 0, b"6"),
    "a member of 1 TB": put_in_archive("runs/0123456789ab/plan.json", 1 << 40),
}


def replace_store(put: Put) -> Put:
    """Replace the tracking store, to which the runs then belong."""

    def change(home: Path) -> None:
        for run in (home / "runs").iterdir():
            change_plan(recipe__tracking__uri=None)(run)
        put(home / "mlflow.db")

    return change


HOME: dict[str, Put] = {
    f"{name}: {form}": replace_store(ANY_FILE[form]) if name == "mlflow.db" else replace(name, ANY_FILE[form])
    for name in ("mlflow.db", "error.log", "runs", "studies", "cache", "judge", "studies/s.json")
    for form in ("a pipe", "without end", "bytes", "a link out")
}
SHELL: dict[str, dict[str, str]] = {
    "columns that are no number": {"COLUMNS": "many", "LINES": "-1"},
    "a billion columns": {"COLUMNS": "1000000000"},
    "no columns": {"COLUMNS": "0", "TERM": "\x1b[2J"},
    "an unknown language": {"LANG": "xx_YY.nonsense", "LC_ALL": "xx_YY.nonsense"},
    "a secret in the store's address": {"MLFLOW_TRACKING_URI": f"http://user:{SECRET}@127.0.0.1:9/"},
    "an odd address of the store": {"MLFLOW_TRACKING_URI": "file:///dev/zero\n"},
    "ranks of another training": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "x"},
    "variables of git": {
        "GIT_EXTERNAL_DIFF": f"touch {CANARY}", "GIT_DIR": "/", "GIT_CONFIG_COUNT": "1", "GIT_SSH_COMMAND": "touch x",
        "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": f"touch {CANARY}", "GIT_PAGER": f"touch {CANARY}",
    },
    "programs of the user": dict.fromkeys(("PAGER", "EDITOR", "VISUAL", "BROWSER"), f"touch {CANARY}"),
    "no path": {"PATH": ""},
    "an empty home": {"SPARSEBP_HOME": ""},
    "a home that is a device": {"SPARSEBP_HOME": "/dev/null"},
    "a home without end": {"SPARSEBP_HOME": "/proc/self/fd/9999/x"},
    "no home of the user": {"HOME": "/dev/null/nowhere", "XDG_CONFIG_HOME": "/dev/null/x"},
    "odd folders for mounts": {"SPARSEBP_MOUNTS": ":::../..:/:\n"},
    "files that are missing": {"SPARSEBP_TARGETS": "/dev/null/t"},
}  # fmt: skip

# Each kind: the word that stands for it in a line (none: every verb meets it), and what is tried.
KINDS: dict[str, tuple[str | None, Mapping[str, object]]] = {
    "recipe or study": ("RECIPE", ANY_FILE | YAML),
    "data": ("DATA", DATA),
    "model": ("MODEL", MODEL),
    "run": ("RUN", RUN),
    "name of a run": ("RUN", NAMES),
    "archive": ("ARCHIVE", ARCHIVE),
    "text": ("TEXT", TEXTS),
    "store and home": (None, HOME),
    "targets.yaml": (None, ANY_FILE | YAML),
    "variable": (None, SHELL),
    "working folder": (None, {"git, modules, programs": None}),
}
# Data that are not there end a verb before it loads torch.
ABSENT = "--set dataset.name=absent.jsonl"
SHORT = "--set dataset.max_seq_length=32"  # as the model allows, so that its other files are looked at
ROWS: dict[str, tuple[str, ...]] = {
    "archive": ("archive RUN --to a.tar.gz", "archive RUN OTHER --to a.tar.gz", "archive TEXT --to a.tar.gz"),
    "audit": ("audit true", "audit RECIPE.yaml", "audit TEXT"),
    "bench": ("bench topk --sites nowhere", "bench topk --recipe RECIPE", "bench TEXT"),  # a process for each --model
    "cancel": ("cancel RUN", "cancel TEXT"),
    "compare": ("compare RUN OTHER", "compare fake", "compare --from ARCHIVE", "compare TEXT",
                "compare OTHER --where TEXT", "compare RUN OTHER --html page.html"),
    "data": (f"data FAKE {ABSENT}", "data RECIPE", "data DATA", "data MODEL", "data FAKE --set TEXT"),
    "datasets": ("datasets",),
    "doctor": ("doctor",),
    "evaluate": ("evaluate RUN --lm-eval ,", "evaluate MODEL_FOLDER --lm-eval ,", "evaluate TEXT --lm-eval x"),
    "export": ("export FAKE -f sbatch", "export RECIPE -f sbatch", "export DATA -f sbatch",
               f"export MODEL -f sbatch {SHORT}", "export FAKE -f sbatch --target TEXT",
               "export FAKE -f sbatch --set TEXT"),
    "fetch": ("fetch nothing", "fetch TEXT"),
    "init": ("init new-folder --task completion", "init new-folder --from RECIPE", "init TEXT"),
    "judge": ("judge FAKE --against FAKE", "judge RECIPE --against FAKE", "judge FAKE --against RECIPE",
              "judge DATA --against DATA", "judge TEXT --against FAKE", "judge TEXT --against TEXT --script true"),
    "logs": ("logs RUN", "logs TEXT"),
    "model": ("model RUN --to m", "model RUN --to m --checkpoint last", "model TEXT --to m"),
    "models": ("models",),
    "new": ("new policy gradient-thing", "new policy TEXT", "new TEXT x"),
    "policies": ("policies", "policies TEXT"),
    "prune": ("prune", "prune RUN", "prune --dry-run", "prune TEXT"),
    "quickstart": ("quickstart --set TEXT", "quickstart --set training.max_steps=3"),
    "recipes": ("recipes", "recipes copy TEXT", "recipes TEXT"),
    "rerun": ("rerun RUN", "rerun TEXT"),
    "resume": ("resume RUN", "resume TEXT"),
    "rm": ("rm RUN --yes", "rm RUN OTHER --yes", "rm TEXT --yes"),
    "run": ("run FAKE --dry-run", "run FAKE", "run RECIPE", "run DATA --dry-run", f"run MODEL --dry-run {SHORT}",
            "run --like RUN --dry-run", "run FAKE --dry-run --target TEXT", "run FAKE --dry-run --set TEXT",
            "run FAKE --dry-run --name TEXT"),
    "runs": ("runs", "runs -o json", "runs --where TEXT", "runs --columns TEXT", "runs --sort TEXT"),
    "schema": ("schema", "schema --all"),
    "show": ("show RUN", "show RUN -o json", "show RUN --from ARCHIVE", "show TEXT"),
    "study": ("study STUDY --dry-run", "study RECIPE --dry-run", "study STUDY --from ARCHIVE",
              "study STUDY --dry-run --target TEXT"),
    "sync": ("sync RUN", "sync --all", "sync TEXT"),
    "tag": ("tag RUN good", "tag RUN TEXT", "tag TEXT good"),
    "targets": ("targets", "targets check TEXT"),
    "validate": ("validate FAKE", "validate RECIPE", "validate DATA", f"validate MODEL {SHORT}", "validate STUDY"),
    "worth": (f"worth FAKE {ABSENT}", "worth RECIPE", "worth DATA", "worth MODEL"),
}  # fmt: skip
LISTING = {
    "compare fake",
    "prune",
    "prune --dry-run",
    "runs",
    "runs -o json",
    "study STUDY --dry-run",
    "sync --all",
}


def lines_of(verb: str, kind: str) -> tuple[str, ...]:
    """Return the lines of a verb that meet a kind of input."""
    if verb == "doctor" and kind != "working folder":
        return ()  # it starts interpreters that import torch and MLflow, which takes ten seconds for each form
    word, _ = KINDS[kind]
    if word is None:
        return ROWS[verb][:1]
    lists = LISTING if word == "RUN" else set()  # a run that is in the store is met by what lists it, too
    return tuple(line for line in ROWS[verb] if line in lists or word in re.findall("[A-Z]+", line))


def count_cells() -> Iterator[tuple[str, list[int]]]:
    """Yield each verb with the number of commands that are run on each kind of input."""
    for verb in ROWS:
        yield verb, [len(lines_of(verb, kind)) * len(forms) for kind, (_, forms) in KINDS.items()]


def name_forms(kind: str) -> list[str]:
    """Return the forms of a kind; those that each of several files takes are named once, behind the files."""
    files: dict[str, list[str]] = {}
    for form in KINDS[kind][1]:
        file, found, rest = form.rpartition(": ")
        files.setdefault(rest if found else form, []).append(file)
    several: dict[tuple[str, ...], list[str]] = {}
    for form, names in files.items():
        several.setdefault(tuple(name for name in names if name), []).append(form)
    return [", ".join(forms) + (f" (each as {', '.join(names)})" if names else "") for names, forms in several.items()]


if __name__ == "__main__":
    for number, kind in enumerate(KINDS):
        print(f"{chr(97 + number)}: {kind}: {', '.join(name_forms(kind))}")
    print(f"{'':12}", *(f"{chr(97 + number):>5}" for number in range(len(KINDS))))
    for verb, counts in count_cells():
        print(f"{verb:12}", *(f"{count or '-':>5}" for count in counts))
