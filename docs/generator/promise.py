"""The page of promises about failures, with the trials of each promise that `make chaos` counted."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

from generator.markdown import code, head, table

TRIALS = Path("docs/reference/promises.json")
MUTANTS = Path("benchmarks/results/mutants.json")
PROMISES = {
    "R1": (
        "somebody kills the process (kill -9) at a random moment, several times in a row, also during a resume or "
        "while it writes a checkpoint",
        "the resumed run ends with the same weights, optimizer state, random generators and metrics as an "
        "uninterrupted run, bit for bit",
    ),
    "R2": (
        "a file of the newest checkpoint is removed, emptied, cut, or changed by one bit, under each policy",
        "the run warns once, resumes from the checkpoint before, and ends with the same result",
    ),
    "R3": (
        "the disk is full, on this machine (under each policy) or on the machine of a target",
        "the run stops with one line of error; earlier checkpoints stay intact; a resumed run ends with the same "
        "result",
    ),
    "R4": (
        "the process gets SIGTERM or SIGINT, as from a scheduler before preemption, under each policy",
        "the run writes a checkpoint after the current step and exits with code 143 or 130; a resumed run ends "
        "with the same result",
    ),
    "R5": (
        "the tracking server refuses connections, hangs, answers very slowly or with an error, or dies during an "
        "answer",
        "training continues; one warning names `sparsebp sync`, which sends the missing numbers",
    ),
    "R6": (
        "eight runs start at once with one new SQLite store",
        "the store gets every logged number, or the run reports that numbers are missing",
    ),
    "R7": (
        "a loss or a gradient is NaN or Inf",
        "the run stops before the optimizer step and names the step",
    ),
    "R9": (
        "the clock jumps back or forward, between attempts of a run or while commands and training processes work",
        "SparseBP orders checkpoints by step, not by time. The result stays the same, except for the peak memory "
        "of a step in which the clock jumps. Every command ends",
    ),
    "R10": (
        "a remote machine or its daemon stops, the connection breaks, the local command is killed, or the power fails",
        "the run counts as unreachable, not as failed; the next command finds it again; only one process writes "
        "at a time",
    ),
    "R11": (
        "a recipe has random changes",
        "the command prints one line of error with file, line and column, exits with code 2, and executes and "
        "writes nothing",
    ),
    "R12": (
        "a folder with a model, checkpoint, artifact or data is hostile",
        "SparseBP refuses it with one line of error, and runs none of its code",
    ),
    "R13": (
        "the environment, the recipe, the store's address or uncommitted files contain secrets",
        "SparseBP writes none of the secrets into the run's folder, the store, logs or error messages",
    ),
    "R14": (
        "the key of an SSH host is unknown or has changed",
        "SparseBP refuses the host",
    ),
    "R15": (
        "a recipe requests mounts, users or capabilities by which code could leave a container",
        "SparseBP refuses the recipe before anything starts",
    ),
    "R16": (
        "the faults of R1 under each registered policy",
        "as for R1",
    ),
    "R17": (
        "recipe, code or data change between a kill and the resume",
        "`resume` refuses and prints a table of the differences; with `--allow-change` it continues, and the run "
        "records this",
    ),
    "R18": (
        "a backward pass of the dense policy runs through the engine",
        "the gradients equal those of `loss.backward()`, bit for bit",
    ),
    "R19": (
        "names and values contain shell syntax, newlines, quotes or leading dashes",
        "each generated script, run by the real shells, starts only the training process",
    ),
    "R20": (
        "an unpacked folder contains a hostile Git configuration, hooks or attributes",
        "no command of SparseBP runs any of it",
    ),
    "R21": (
        "a mount is a link to a socket or a system folder, or contains one",
        "SparseBP resolves the path and refuses the mount",
    ),
    "R22": (
        "a run, a line of an event log, a file beside a checkpoint or a row of a store is unreadable, or a file "
        "never ends",
        "the command names it in one line and continues with the others",
    ),
    "R23": (
        "an update makes weights that are not finite",
        "no checkpoint contains such weights, and the run ends as *diverged*",
    ),
    "R24": (
        "two processes work on one run",
        "only one of them writes",
    ),
    "R25": (
        "a run takes 20,000 steps; the run folder contains 300 runs",
        "memory use stays constant, the event log grows linearly, and the work to list, prune or compare runs grows in "
        "proportion to their number",
    ),
    "R26": (
        "a run on several nodes loses a process, a launcher or a node, or one of them hangs",
        "the run never hangs: it ends with one line that names the lost part, or returns to the queue and resumes",
    ),
    "R27": (
        "the power fails at any moment of a run, a study, a fetch from a target, or a prune (disks with ext4 and XFS)",
        "whatever SparseBP reported as finished is finished and complete; it deletes no copy before another copy "
        "is complete",
    ),
    "R28": (
        "`target.json` or `plan.json` exists but is unreadable",
        "a run on another machine counts as unreachable, not as ended; a study writes the plan again",
    ),
    "R29": (
        "a login shell or a line of `setup` prints something, fails, or sets shell options",
        "SparseBP does not take the output for data or for the number of a job; a failed line ends the command, "
        "and the error names it",
    ),
    "R30": (
        "before each new checkpoint, a job gets the scheduler's warning or loses a node; or the count of its "
        "restarts is lost",
        "the job returns to the queue a limited number of times, then the run ends and says why; a job that makes "
        "checkpoints returns each time",
    ),
    "R31": (
        "a message names a command, for any kind of error",
        "in the state in which SparseBP printed the message, the command does what the message says; a test fails "
        "if a new message has no such check",
    ),
    "R32": (
        "archives, answers of training processes, event logs, plans, weights or configs are larger than they can "
        "validly be",
        "SparseBP refuses them by their size with one line of error, and uses less than 256 MiB",
    ),
    "R33": (
        "`base` in a recipe names a file with secrets",
        "SparseBP refuses a base outside of the recipe's folder or repository, and no error quotes a file that is "
        "not a recipe",
    ),
    "R34": (
        "a training takes 20 to 500 steps with batches of changing shapes, with any policy, by each way to use "
        "SparseBP (engine, `Trainer`, callback, accelerate, a script, a recipe)",
        "memory does not leak: at the end there are as many tensors, classes, functions and registry entries as midway",
    ),
    "R35": (
        "PyTorch is pip's build for CUDA, and the machine has no GPU",
        "the quickstart works, and the tests of GPU code (with a fake device and Triton's interpreter) pass as "
        "with the CPU build",
    ),
    "R36": (
        "a model has 10,000 linear layers",
        "the time to attach a policy grows in proportion to the number of layers (the tests count CPU time, but "
        "we guarantee no value)",
    ),
    "R38": (
        "a file system answers reads and writes with an error (EIO), or becomes read-only during a run",
        "the run stops with one line of error; earlier checkpoints stay intact; a resumed run ends with the same "
        "result",
    ),
    "R39": (
        "50 runs wait for a device at once",
        "SparseBP trains each run once, never more than the limit at a time, and one stop ends all of them",
    ),
}
TEXT = """This page lists what SparseBP guarantees when something goes wrong, and how often tests tried it. In a
*trial*, a test causes one fault in a real component: it kills a process, damages a file, or lets a shell run a
generated script. A *failure* is a trial in which the guarantee did not hold. `make chaos` runs all trials and counts
them; `make test` runs a few of each row. The column *counted* has the day and the commit of the count. *Changed since*
means that the code behind the guarantee has changed after the count (`tests/trials.py` lists the files). In R2 to R4,
*the same result* does not include the peak memory of a single step, because the first step of a process allocates a
little more. The *store* is the MLflow store. A *target* is the place where a run trains, such as a container or a
cluster."""

INPUTS = """## Hostile inputs

`tests/cli/test_hostile_input.py` and `tests/cli/test_hostile_folder.py` run every command of SparseBP on every kind of
input that it reads. Each command must end, with at most one line of error. It must not execute the input, quote a
secret, or change a file outside of the run store and the working folder. The table counts the trials. A dash means that
the command does not read such an input. `doctor` imports torch, so the tests try it only in a hostile working folder. A
test fails if a command has no row, or if no trial covers a parameter that names a file. Below the table, a list names
the inputs of each kind. `python -m tests.cli.hostile` prints the table."""


def page(root: Path) -> str:
    """Return the page."""
    found: dict[str, dict[str, Any]] = json.loads((root / TRIALS).read_text(encoding="utf-8"))
    unknown = sorted(found.keys() - PROMISES.keys())
    assert not unknown, f"{TRIALS} counts trials of {unknown}, which docs/generator/promise.py does not name"
    digest = runpy.run_path(str(root / "tests" / "trials.py"))["find_digest"]
    rows = [(name, *texts, *_counted(found.get(name), digest(name, root))) for name, texts in PROMISES.items()]
    columns = ("", "fault", "guarantee", "trials", "failures", "counted", "tests")
    parts = [head("Guarantees under faults", TEXT), table(columns, rows), _versions(found), _mutants(root)]
    return "\n".join([*parts, "", INPUTS, "", *_inputs(root)])


def _mutants(root: Path) -> str:
    """Return how many changes of the guards their tests notice."""
    if not (root / MUTANTS).exists():
        return "## Tests of the guards\n\nNot counted yet: `make mutants` counts them.\n"
    found: dict[str, Any] = json.loads((root / MUTANTS).read_text(encoding="utf-8"))
    rows = [
        (name, str(row["named"]), str(row["drawn"]), f"{row['killed']} of {row['tried']}")
        for name, row in found["modules"].items()
    ]
    killed, tried = (sum(row[key] for row in found["modules"].values()) for key in ("killed", "tried"))
    text = f"""## Tests of the guards

`make mutants` makes one small change (a *mutant*) in the code behind these guarantees, and runs the tests of the
changed module. At least one test should then fail. Some mutants are written by hand; others are drawn at random, with
the commit's hash as the seed. The tests noticed {killed} of {tried} mutants, {100 * killed // tried} %, on
{found["date"]} at commit `{found["commit"][:12]}` ({found["machine"]}). {found.get("note", "")}
"""
    return "\n".join([text, table(("module", "by hand", "drawn", "noticed"), rows)])


def _inputs(root: Path) -> list[str]:
    """Return the table of verbs by inputs, and the forms of each kind of input."""
    found = runpy.run_path(str(root / "tests" / "cli" / "hostile.py"), run_name="hostile")
    rows = [(code(verb), *(str(count or "-") for count in counts)) for verb, counts in found["count_cells"]()]
    kinds = found["KINDS"]
    forms = [f"- {kind}: {', '.join(found['name_forms'](kind))}" for kind in kinds]
    return [table(("", *kinds), rows), "\n".join(forms) + "\n"]


def _counted(row: dict[str, Any] | None, digest: str) -> tuple[str, ...]:
    if row is None:
        return ("not counted", "", "", "")
    kinds = "".join(f"; {kind}: {count}" for kind, count in row["of which"].items())
    skipped = f"; {row['skipped']} skipped" if row["skipped"] else ""
    tests = ", ".join(code(test.removeprefix("tests/")) for test in row["tests"])
    when = f"{row['date']}, {code(row['commit'])}" if "commit" in row else row["date"]
    when += "" if row.get("digest") == digest else "; *changed since*"
    failures = f"{row['failures']}: {row['note']}" if "note" in row else str(row["failures"])  # the next count has none
    return (f"{row['trials']:,}{kinds}{skipped}", failures, when, tests)


def _versions(found: dict[str, dict[str, Any]]) -> str:
    lines = set()
    for row in found.values():
        versions = {"Python": row["python"]} | row["versions"]
        lines.add(", ".join(filter(None, (row.get("machine"), *(f"{name} {n}" for name, n in versions.items())))))
    return "Counted on: " + "; ".join(sorted(lines)) + ".\n"
