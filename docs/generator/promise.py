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
        "kill -9 at a random moment, several times in a row, also during a resume and inside a save",
        "the run resumes to the same weights, optimizer state, generators and metrics, bit for bit",
    ),
    "R2": (
        "a file of the newest checkpoint is removed, emptied, cut or changed by one bit, under each policy",
        "the run falls back to the checkpoint before, with one warning, and ends with the same result",
    ),
    "R3": (
        "the disk is full, here (under each policy) or on the machine of a target",
        "earlier checkpoints stay intact, the run stops with one line, and resumes to the same result",
    ),
    "R4": (
        "SIGTERM or SIGINT, as a scheduler sends them before it takes the machine away, under each policy",
        "a checkpoint at the next step, exit code 143 or 130, and the same result after resuming",
    ),
    "R5": (
        "the tracking server refuses, hangs, drips, answers with an error, or dies midway",
        "training goes on; one warning names `sparsebp sync`, which sends what is missing",
    ),
    "R6": (
        "eight runs start at once on one new SQLite store",
        "every point is in the store, or the run reports that it is not",
    ),
    "R7": ("NaN or Inf in a loss or a gradient", "the run stops before the update and names the step"),
    "R9": (
        "the clock steps back or forward, between attempts or while clients and workers are at work",
        "steps alone order checkpoints; the result is the same but for the peak memory of a step in which it jumps, "
        "and every command ends",
    ),
    "R10": (
        "a remote host or its daemon goes away, the connection breaks, the client is killed, the power fails",
        "the run is unreachable, not failed; the next command finds it again; one process writes at a time",
    ),
    "R11": (
        "a recipe is mutated at random",
        "one line with file, line and column; exit code 2; nothing is executed or written",
    ),
    "R12": ("a model, checkpoint, artifact or data folder is hostile", "one line refuses it; none of its code runs"),
    "R13": (
        "the environment, the recipe, the store's address or uncommitted files contain secrets",
        "none of them is found in the run's folder, the store, logs or error messages",
    ),
    "R14": ("the key of an SSH host is unknown or has changed", "the host is refused"),
    "R15": (
        "a recipe requests mounts, users or capabilities that lead out of a container",
        "it is refused before anything starts",
    ),
    "R16": ("the faults of R1 under each registered policy", "the promise of R1"),
    "R17": (
        "plan, code or data change between a kill and the resume",
        "the resume is refused with a table of what differs; `--allow-change` goes on and is recorded",
    ),
    "R18": ("the dense policy goes through the engine", "gradients equal those of `loss.backward()`, bit for bit"),
    "R19": (
        "names and values hold shell syntax, newlines, quotes or leading dashes",
        "the real shells run each generated script, and nothing but the worker starts",
    ),
    "R20": ("an unpacked folder brings a hostile Git configuration, hooks or attributes", "no command runs any of it"),
    "R21": (
        "a mount is a link to, or an ancestor of, a socket or a system folder",
        "it is refused by its resolved path",
    ),
    "R22": (
        "a run, a journal line, a neighbour of a checkpoint or a row of a store cannot be read, or a file never ends",
        "one line names it, and the command goes on with the others",
    ),
    "R23": ("an update makes weights that are not finite", "no checkpoint holds them, and the run ends as diverged"),
    "R24": ("two processes work at one run", "one of them writes"),
    "R25": (
        "a run makes 20,000 steps; a store holds 2,000 runs",
        "memory is flat, the journal grows linearly, and listing takes under a second of CPU",
    ),
    "R26": (
        "a run on several nodes loses a rank, a launcher or a node, or one of them hangs",
        "the run ends with one line that names it, or goes back into the queue and resumes; it never hangs",
    ),
    "R27": (
        "the power fails at any moment of a run, a study, a fetch from a target, a prune (disks of ext4 and XFS)",
        "what was told finished is finished and whole; no copy was deleted in favour of one that is not",
    ),
    "R28": (
        "`target.json` or `plan.json` is there and cannot be read",
        "a run elsewhere is unreachable, not over; a study makes the plan again",
    ),
    "R29": (
        "a login shell or a line of `setup` prints something, fails, or sets options of the shell",
        "none of it is taken for data or for a job's number; a failed line ends the command and is named",
    ),
    "R30": (
        "a job is warned each time before it has made a new checkpoint, loses a node each time, or its count is lost",
        "it goes back into the queue a counted number of times, then the run ends and says why; a job that makes "
        "checkpoints goes back each time",
    ),
    "R31": (
        "a message names a command, whatever went wrong",
        "in the state that printed it the command does what the message says; a new message without its story fails",
    ),
    "R32": (
        "archives, workers' answers, journals, plans, weights and configs are larger than they can be",
        "one line refuses them by size, in less than 256 MiB",
    ),
    "R33": (
        "a recipe's `base` names a file of secrets",
        "it is refused outside the recipe's folder or repository, and no error quotes what is no recipe",
    ),
    "R34": (
        "a training takes 20 to 500 steps of changing shapes, with any policy and through any door (engine, `Trainer`, "
        "callback, accelerate, a script, the worker)",
        "nothing is left behind: at the end there are as many tensors, classes, functions and entries of registries as "
        "midway",
    ),
    "R35": (
        "PyTorch is the build for CUDA that pip gives, and there is no GPU",
        "the quickstart works, and the tests of the GPU's code (fake device, Triton's interpreter) pass as with the "
        "build for processors",
    ),
    "R36": (
        "a model has 10,000 linears",
        "each policy is attached in time proportional to their number (CPU time is counted, not promised)",
    ),
    "R38": (
        "a file system answers reads and writes with an error (EIO), or becomes read-only at work",
        "the run stops with one line, earlier checkpoints stay whole, and it resumes to the same result",
    ),
    "R39": (
        "50 runs wait for their turn at once",
        "each is trained once, no more than the limit at a time, and one stop ends all of them",
    ),
}
TEXT = """This page lists what SparseBP guarantees when something goes wrong, and how often tests tried it. A trial is
one fault put into a real component: a worker process that is killed, a file that is damaged, a shell that runs a
generated script. Each row is counted by the tests that it names, when `make chaos` runs them; `make test` runs a few
trials of each. A failure is a trial that broke the promise. *Counted* is the day and the commit. *Changed since* means
that the code which keeps the promise is no longer what was counted (`tests/trials.py` lists the files). In R2 to R4
the peak memory of a single step is no part of the result: the first step of a process allocates a little more."""

INPUTS = """## Hostile inputs

`tests/cli/test_hostile_input.py` and `tests/cli/test_hostile_folder.py` run every verb on every kind of input that it
reads. Each command must end, with at most one line of error. It must run nothing of the input, quote no secret, and
change no file outside of the run store and the working folder. The numbers count commands; a dash means that the verb
does not read such an input. `doctor` imports torch, so only the working folder is tried. A verb without a row fails a
test. So does a parameter that names a file, if no command reads it.
`python -m tests.cli.hostile` prints this table."""


def page(root: Path) -> str:
    """Return the page."""
    found: dict[str, dict[str, Any]] = json.loads((root / TRIALS).read_text(encoding="utf-8"))
    unknown = sorted(found.keys() - PROMISES.keys())
    assert not unknown, f"{TRIALS} counts trials of {unknown}, which docs/generator/promise.py does not name"
    digest = runpy.run_path(str(root / "tests" / "trials.py"))["find_digest"]
    rows = [(name, *texts, *_counted(found.get(name), digest(name, root))) for name, texts in PROMISES.items()]
    columns = ("", "fault", "promise", "trials", "failures", "counted", "tests")
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

`make mutants` changes one place of the code that keeps these promises, and runs the tests of its module. It tries
mutants by hand, and others that the commit's hash draws. Tests killed {killed} of {tried}, {100 * killed // tried} %,
on {found["date"]} at commit `{found["commit"][:12]}` ({found["machine"]}). {found.get("note", "")}
"""
    return "\n".join([text, table(("module", "by hand", "drawn", "killed"), rows)])


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
