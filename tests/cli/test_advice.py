"""Every `sparsebp ...` that a message of the package names does what the message says, in the state that printed it.

The messages are collected from the package's strings. Each stands in the table below, with the story that meets it and
follows its advice, or with the test elsewhere that does so where the state is dear to make. A new message that names a
command fails the first test until it has its story.
"""

from __future__ import annotations

import ast
import errno
import html
import os
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

import sparsebp_cli.target
from benchmarks import house
from sparsebp_cli.cli.app import VERBS
from sparsebp_cli.cli.follow import print_end
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import History, JournalWriter, RunFolder, State, home, list_runs
from sparsebp_cli.target import CheckResult, Job, Target
from sparsebp_cli.target.local import LocalJob

from ..target.fake_worker import measure
from .conftest import Cli, Start, Write, write_run
from .test_handle import until
from .test_rerun import seal_run

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds, of a busy machine
PACKAGES = [ROOT / folder for folder in house.PACKAGES]
NAMES = "|".join(sorted(verb.__name__ for verbs in VERBS.values() for verb in verbs))
QUOTED = re.compile(rf"`(sparsebp (?:{NAMES})\b[^`]*)`")
BARE = re.compile(rf"(?<!`)\bsparsebp (?:{NAMES})(?![\w:`])[^`;()]*")


class Message(NamedTuple):
    """A string of the package, with {} for what is put into it."""

    file: str
    text: str

    def commands(self) -> list[str]:
        return QUOTED.findall(self.text) + [one.strip() for one in BARE.findall(QUOTED.sub("", self.text))]


def collect() -> Iterator[Message]:
    """Yield every string of the package that names a command; docstrings are no messages."""
    for package, file in [(room, file) for room in PACKAGES for file in sorted(room.rglob("*.py"))]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        passed = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        passed -= {id(node) for node in nodes if isinstance(node, ast.JoinedStr)}
        passed |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            message = Message(str(file.relative_to(package)), _read(node)) if id(node) not in passed else None
            if message is not None and message.commands():
                yield message


def _read(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


MESSAGES = list(collect())


@dataclass
class Reader:
    """Somebody who meets a message and does what it says."""

    call: Cli
    start: Start
    write_recipe: Write
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    target: AtOnce
    printed: str = ""
    followed: set[tuple[str, str]] = field(default_factory=set)

    def meet(self, *words: object) -> subprocess.CompletedProcess[str]:
        done = self.call(*words)
        self.printed = done.stdout + done.stderr
        return done

    def follow(self, file: str, command: str, *more: str, code: int = 0, **names: object) -> str:
        """Find the message with a command in what was printed, and run the command; ``names`` are put in the place of
        words like RECIPE. Return what it printed."""
        shown = " ".join(self.printed.split())
        messages = [" ".join(m.text.split()) for m in MESSAGES if m.file == file and command in m.commands()]
        assert any(re.search(_pattern(text), shown) for text in messages), f"none of {messages} is in {shown!r}"
        wanted = _pattern(command).replace("(.*?)", "(.+?)") + r"(?=`|;|$| \()"
        found = re.search(wanted, self.printed, re.MULTILINE) or re.search(wanted, shown)
        assert found, f"{command!r} is not in {shown!r}"
        words = [str(names.get(word, word)) for word in shlex.split(found[0])[1:]]
        done = self.call(*words, *more)
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        self.followed.add((file, command))
        return done.stdout + done.stderr


def _pattern(text: str) -> str:
    return re.escape(text).replace(r"\{\}", "(.*?)")


class AtOnce(Target):
    """A target whose runs are over as soon as they are submitted; ``then`` is called after each."""

    options_class = TargetOptions
    status: State = State.FINISHED
    then: Callable[[], object] = staticmethod(lambda: None)

    def command(self, run: RunFolder) -> list[str]:
        return ["true"]

    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        for run in runs:
            last = run.read_plan()["recipe"]["training"]["max_steps"]
            with JournalWriter(run.path) as journal:
                journal.write("attempt", from_step=0, environment={"python": "3", "packages": {}})
                for step in range(1, last + 1):
                    journal.write("metrics", step=step, values=measure(step) | {"eval/loss": 3.0})
                journal.write("end", status=str(self.status), step=last, text="")
            self.then()
        return [self.reattach(run) for run in runs]

    def reattach(self, run: RunFolder) -> Job:
        return LocalJob(run)

    def check(self) -> Iterator[CheckResult]:
        return iter(())


@pytest.fixture
def reader(call: Cli, start: Start, write_recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    target = AtOnce()
    monkeypatch.setattr(sparsebp_cli.target, "make_target", lambda _: target)
    monkeypatch.setenv("COLUMNS", "500")  # no line of a table is broken
    return Reader(call, start, write_recipe, tmp_path, monkeypatch, target)


def write_ended(reader: Reader, status: State, text: str = "") -> RunFolder:
    run = write_run(reader.write_recipe())
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=3, environment={})
        journal.write("end", status=status, step=3, text=text)
    return run


# Stories


def meet_nothing(reader: Reader) -> None:
    reader.meet("runs")
    reader.follow("cli/runs.py", "sparsebp run RECIPE", RECIPE=reader.write_recipe())
    assert list_runs()[0].state() is State.FINISHED
    reader.meet("compare")
    reader.follow("cli/compare.py", "sparsebp runs")
    reader.meet("show", "nosuch")
    reader.follow("run/folder.py", "sparsebp runs")
    reader.meet("compare", "nosuch")
    reader.follow("run/folder.py", "sparsebp runs")


def meet_removed(reader: Reader) -> None:
    run, other = write_run(reader.write_recipe(name="one")), write_run(reader.write_recipe(name="other"))
    reader.meet("diff", run.run_id, other.run_id)
    reader.follow("cli/verb_help.py", "sparsebp compare RUN OTHER", RUN=run.run_id, OTHER=other.run_id)
    reader.meet("note", run.run_id, "seen")
    reader.follow("cli/verb_help.py", "sparsebp tag RUN NAME", RUN=run.run_id, NAME="seen")
    reader.meet("top")
    assert run.run_id in reader.follow("cli/verb_help.py", "sparsebp runs --watch")
    reader.meet("ui")
    assert run.run_id in reader.follow("cli/verb_help.py", "sparsebp runs")


def meet_lists(reader: Reader) -> None:
    reader.meet("recipes", "copy")
    assert "topk" in reader.follow("cli/init.py", "sparsebp recipes")
    reader.meet("recipes", "copy", "nosuch")
    assert "topk" in reader.follow("cli/starter/shipped.py", "sparsebp recipes")
    reader.meet("recipes")
    listed = reader.printed
    reader.follow("cli/init.py", "sparsebp run NAME", NAME="topk-rows")
    reader.printed = listed
    reader.follow("cli/init.py", "sparsebp study papers/NAME", "--dry-run", **{"papers/NAME": "papers/lora-sst2"})
    reader.printed = listed
    to = reader.folder / "copied"
    to.mkdir()
    reader.follow("cli/init.py", "sparsebp recipes copy NAME [TO]", **{"NAME": "topk-rows", "[TO]": to})
    assert list(to.glob("*.yaml"))
    reader.meet("targets", "check")
    assert "docker" in reader.follow("cli/targets.py", "sparsebp targets")
    reader.meet("run", "topk-rows", "--target", "nosuch")
    assert "docker" in reader.follow("recipe/target.py", "sparsebp targets")
    reader.meet("policies")
    assert "keep" in reader.follow("cli/policies.py", "sparsebp policies NAME", NAME="topk")


def meet_ends(reader: Reader) -> None:
    run = write_ended(reader, State.CANCELLED)
    reader.meet("resume", run.run_id)
    reader.follow("cli/control.py", "sparsebp resume {} --cancelled")
    assert run.state() is State.FINISHED
    changed = "changed since step 3: ('training.seed', '0', '1')"
    advice = "if this is intended: `sparsebp resume {0} --allow-change training.seed`"
    run = write_ended(reader, State.FAILED)
    with JournalWriter(run.path) as journal:
        journal.write("end", status="failed", step=3, text=f"{changed}; {advice.format(run.run_id)}")
    reader.meet("show", run.run_id)
    reader.follow("errors.py", "sparsebp resume {} {}")
    assert run.state() is State.FINISHED


def meet_next(reader: Reader) -> None:
    recipe = reader.write_recipe()
    reader.meet("run", recipe)
    reader.follow("cli/summary.py", "sparsebp show {}")
    reader.meet("run", recipe, "--seeds", "0,1")
    assert "fake" in reader.follow("cli/summary.py", "sparsebp compare {}")


def meet_rerun(reader: Reader) -> None:
    run = write_run(reader.write_recipe())
    reader.meet("rerun", run.run_id)
    reader.follow("verb/rerun.py", "sparsebp run --like {}")
    assert len(list_runs()) == 2
    assert reader.call("rerun", seal_run(run).run_id).returncode in {0, 2}  # it has a record of its code now


def meet_archive(reader: Reader) -> None:
    run = write_run(reader.write_recipe())
    (reader.folder / "no.tar.gz").write_bytes(b"\x1f\x8b no archive")
    for place, file in (("sqlite:////none.db", "cli/compare.py"), ("no.tar.gz", "compare/archive.py")):
        reader.meet("compare", "--from", place)
        reader.follow(file, "sparsebp archive", run.run_id, "--to", "runs.tar.gz")
    with tarfile.open(reader.folder / "runs.tar.gz") as archive:
        report = archive.extractfile(next(name for name in archive.getnames() if name.endswith("report.html")))
        assert report is not None
        reader.printed = re.sub(r"<[^>]+>", "\n", report.read().decode())
    reader.printed = next(line for line in reader.printed.splitlines() if line.startswith("sparsebp compare --from"))
    assert "fake" in reader.follow("cli/archive.py", "sparsebp compare --from {}")


def meet_report(reader: Reader) -> None:
    for seed in (0, 1):
        write_run(reader.write_recipe("ok", "topk-rows"), f"training.seed={seed}")
        write_run(reader.write_recipe("ok", "dense"), "policy=dense", f"training.seed={seed}")
    reader.meet("compare", "topk-rows", "dense", "--baseline", "dense", "--html", "report.html")
    page = re.sub(r"<[^>]+>", "\n", (reader.folder / "report.html").read_text())
    for start, file, command in (
        ("sparsebp run topk", "compare/report/__init__.py", "sparsebp run {}"),
        ("sparsebp run --like", "compare/control.py", "sparsebp run --like {} --name {} {}{}"),
    ):
        reader.printed = next(html.unescape(line) for line in page.splitlines() if line.startswith(start))
        before = len(list_runs())
        reader.follow(file, command)
        assert len(list_runs()) > before


def meet_studies(reader: Reader) -> None:
    (reader.folder / "base.yaml").write_text(reader.write_recipe().read_text())
    file = reader.folder / "my study.yaml"
    file.write_text("version: 1\nstudy: tiny\nbase: base.yaml\narms: {a: {}, b: {}}\nseeds: {report: 0-1}\n")
    reader.meet("compare", "--study", "tiny")
    reader.follow("study/record.py", "sparsebp study FILE", "--dry-run", FILE=file)
    reader.target.then = lambda: os.kill(os.getpid(), signal.SIGINT)
    reader.target.status = State.INTERRUPTED
    reader.meet("study", file)
    reader.target.then, reader.target.status = (lambda: None), State.FAILED
    reader.follow("verb/study.py", "sparsebp study {}", code=100)
    reader.meet("study", file)
    reader.target.status = State.FINISHED
    reader.printed = reader.follow("verb/study.py", "sparsebp study {}")
    assert "a" in reader.follow("verb/study.py", "sparsebp compare --study {}")
    for run in list_runs():
        shutil.rmtree(run.path)
    reader.meet("compare", "--study", "tiny")
    reader.follow("study/selection.py", "sparsebp study {}")


def wait_for_working() -> RunFolder:
    found: list[RunFolder] = []

    def look() -> bool:
        alive = (run for run in list_runs() if run.state() is State.RUNNING)
        found.extend(run for run in alive if History.load(run.path).series("train/loss"))
        return bool(found)

    until(look, PATIENCE)
    return found[0]


def meet_living(reader: Reader) -> None:
    client = reader.start("run", reader.write_recipe("slow"), "--seeds", "0,1")
    run = wait_for_working()
    reader.meet("rm", "--yes", run.run_id)
    reader.follow("cli/housekeeping.py", "sparsebp cancel {}")
    assert run.state() is State.CANCELLED
    second = wait_for_working()
    watcher = reader.start("logs", "-f", second.run_id)
    until(lambda: watcher.stdout is not None and watcher.stdout.readline(), PATIENCE)
    watcher.send_signal(signal.SIGINT)
    reader.printed = " ".join(watcher.communicate(timeout=PATIENCE))
    reader.follow("cli/follow.py", "sparsebp cancel {}")
    assert second.state() is State.CANCELLED
    client.communicate(timeout=PATIENCE)
    client = reader.start("run", reader.write_recipe("slow"), "--seeds", "2,3")
    wait_for_working()
    client.send_signal(signal.SIGINT)
    printed = " ".join(client.communicate(timeout=PATIENCE))
    for part in (printed.partition("not started")[0], "not started" + printed.partition("not started")[2]):
        reader.printed = part
        reader.follow("cli/follow.py", "sparsebp resume {}")
    assert [found.state() for found in list_runs()[:2]] == [State.FINISHED] * 2


def meet_doctor(reader: Reader) -> None:
    def fail() -> None:
        raise ValueError("a plugin's own")

    reader.monkeypatch.setattr("sparsebp_cli.recipe.recipe_schema", fail)
    reader.meet("doctor")
    assert "topk" in reader.follow("cli/checkup.py", "sparsebp policies")


def meet_quickstart(reader: Reader) -> None:
    reader.meet("quickstart", "--set", "training.max_steps=12")
    for command in ("sparsebp compare {}", "sparsebp show {}"):
        assert "quickstart" in reader.follow("cli/quickstart.py", command)
    reader.follow("cli/quickstart.py", "sparsebp init study", "--task", "text")  # a terminal is asked


def meet_full_disk(reader: Reader) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):

        def fail(number: int = number) -> None:
            raise OSError(number, os.strerror(number), "/a/place")

        with reader.monkeypatch.context() as patch:
            patch.setattr("sparsebp_cli.cli.runs.list_runs", fail)
            reader.meet("runs")
        reader.follow("errors.py", "sparsebp prune")


def meet_keys_of_others(reader: Reader) -> None:
    run = write_ended(reader, State.INTERRUPTED)
    for key, command in (("output_dir", "sparsebp show"), ("resume_from_checkpoint", "sparsebp resume RUN")):
        recipe = reader.write_recipe(name="other")
        recipe.write_text(recipe.read_text() + f"{key}: x\n")
        reader.meet("validate", recipe)
        reader.follow("recipe/foreign_key.py", command, *([] if "RUN" in command else ["@last"]), RUN=run.run_id)
    assert run.state() is State.FINISHED


def meet_a_home_that_moves(reader: Reader) -> None:
    run, new = write_ended(reader, State.INTERRUPTED), reader.folder / "new"
    home().rename(new)
    with redirect_stderr(StringIO()) as said:
        assert print_end(LocalJob(run)) == 101
    reader.printed = said.getvalue()
    reader.monkeypatch.setenv("SPARSEBP_HOME", str(new))
    reader.follow("run/folder.py", "sparsebp resume {}")


STORIES: dict[Callable[[Reader], None], tuple[tuple[str, str], ...]] = {
    meet_nothing: (
        ("cli/runs.py", "sparsebp run RECIPE"),
        ("cli/compare.py", "sparsebp runs"),
        ("run/folder.py", "sparsebp runs"),
    ),
    meet_removed: (
        ("cli/verb_help.py", "sparsebp compare RUN OTHER"),
        ("cli/verb_help.py", "sparsebp tag RUN NAME"),
        ("cli/verb_help.py", "sparsebp runs --watch"),
        ("cli/verb_help.py", "sparsebp runs"),
    ),
    meet_lists: (
        ("cli/init.py", "sparsebp recipes"),
        ("cli/init.py", "sparsebp run NAME"),
        ("cli/init.py", "sparsebp study papers/NAME"),
        ("cli/starter/shipped.py", "sparsebp recipes"),
        ("cli/init.py", "sparsebp recipes copy NAME [TO]"),
        ("cli/targets.py", "sparsebp targets"),
        ("recipe/target.py", "sparsebp targets"),
        ("cli/policies.py", "sparsebp policies NAME"),
    ),
    meet_ends: (
        ("cli/control.py", "sparsebp resume {} --cancelled"),
        ("errors.py", "sparsebp resume {} {}"),
    ),
    meet_next: (("cli/summary.py", "sparsebp show {}"), ("cli/summary.py", "sparsebp compare {}")),
    meet_rerun: (("verb/rerun.py", "sparsebp run --like {}"),),
    meet_archive: (
        ("compare/archive.py", "sparsebp archive"),
        ("cli/compare.py", "sparsebp archive"),
        ("cli/archive.py", "sparsebp compare --from {}"),
    ),
    meet_report: (
        ("compare/report/__init__.py", "sparsebp run {}"),
        ("compare/control.py", "sparsebp run --like {} --name {} {}{}"),
    ),
    meet_studies: (
        ("study/record.py", "sparsebp study FILE"),
        ("study/selection.py", "sparsebp study {}"),
        ("verb/study.py", "sparsebp study {}"),
        ("verb/study.py", "sparsebp compare --study {}"),
    ),
    meet_living: (
        ("cli/housekeeping.py", "sparsebp cancel {}"),
        ("cli/follow.py", "sparsebp cancel {}"),
        ("cli/follow.py", "sparsebp resume {}"),
    ),
    meet_doctor: (("cli/checkup.py", "sparsebp policies"),),
    meet_quickstart: (
        ("cli/quickstart.py", "sparsebp compare {}"),
        ("cli/quickstart.py", "sparsebp show {}"),
        ("cli/quickstart.py", "sparsebp init study"),
    ),
    meet_full_disk: (("errors.py", "sparsebp prune"),),
    meet_keys_of_others: (
        ("recipe/foreign_key.py", "sparsebp show"),
        ("recipe/foreign_key.py", "sparsebp resume RUN"),
    ),
    meet_a_home_that_moves: (("run/folder.py", "sparsebp resume {}"),),
}

# The tests that follow an advice whose state is dear to make: a training, a package index, a server.
ELSEWHERE = {
    ("cli/init.py", "sparsebp validate {}"): ("cli/test_foreign_recipe.py::test_the_recipe_of_local_data_validates"),
    ("asset/fetched.py", "sparsebp fetch {}"): "asset/test_fetched.py::test_a_model_is_taken_out_of_its_package_once",
    ("verb/assets.py", "sparsebp fetch {}"): "asset/test_fetched.py::test_a_model_is_taken_out_of_its_package_once",
    ("report/kind.py", "sparsebp audit --apply"): (
        "plugins/sparsebp-audit/tests/test_apply.py::test_a_script_trains_to_the_same_losses_with_less_work"
    ),
    ("backward/kind/packing/verify.py", "sparsebp audit --examples"): (
        "plugins/sparsebp-audit/tests/test_shown_examples.py::test_trainers_and_collators_are_judged"
    ),
    ("bench/table.py", "sparsebp validate --probe RECIPE"): (
        "cli/test_app.py::test_validate_with_probe_prints_what_a_step_costs_and_what_choosing_may_gain"
    ),
    ("cli/archive.py", "sparsebp archive @STUDY --thin --to FILE"): (
        "study/test_rebuild.py::test_a_thin_archive_says_of_choices_and_report_what_a_whole_one_says"
    ),
    ("target/launch.py", "sparsebp resume {}"): (
        "target/test_weather.py::test_a_run_is_started_once_and_ends_right_in_every_weather"
    ),
    ("worker/step_cost.py", "sparsebp worth RECIPE"): (
        "worker/test_worth.py::test_uniform_examples_are_worth_exactly_their_price"
    ),
    ("cli/checkup.py", "sparsebp sync --all"): (
        "cli/test_machine.py::test_sync_sends_what_was_not_sent_and_twice_sends_nothing"
    ),
    ("tracking/flush.py", "sparsebp sync {}"): (
        "tracking/test_moved.py::test_what_was_deleted_in_the_store_is_brought_back_by_the_command_of_the_warning"
    ),
    ("tracking/flush.py", "sparsebp sync {} --uri {}"): (
        "tracking/test_moved.py::test_a_run_whose_own_address_is_refused_is_sent_by_the_command_of_the_warning"
    ),
    ("cli/archive.py", "sparsebp compare --study {} --from {}"): (
        "study/test_rebuild.py::test_choices_follow_from_the_archive_in_an_empty_home"
    ),
    ("verb/study.py", "sparsebp archive @{}"): (
        "study/test_rebuild.py::test_an_archive_of_runs_alone_says_how_to_make_one"
    ),
    ("study/record.py", "sparsebp archive @{} --to FILE"): (
        "study/test_rebuild.py::test_an_archive_of_runs_alone_says_how_to_make_one"
    ),
    ("cli/follow.py", "sparsebp logs {} --follow"): "cli/test_programs.py::test_what_an_answer_says_next_works",
    ("verb/evaluate.py", "sparsebp compare {} --metric {}"): (
        "cli/test_evaluate.py::test_the_line_after_a_judgement_names_a_comparison_that_works"
    ),
    ("cli/summary.py", "sparsebp model {}"): ("cli/test_model.py::test_the_last_line_of_a_summary_is_the_command"),
    ("release/weights.py", "sparsebp model {} --checkpoint last"): (
        "worker/test_model_folder.py::test_a_run_that_stopped_leaves_from_its_checkpoint_alone"
    ),
    ("release/card.py", "sparsebp run recipe.yaml"): (
        "worker/test_model_folder.py::test_a_full_fine_tune_leaves_bit_by_bit_with_the_files_of_its_source"
    ),
    ("target/launch.py", "sparsebp runs"): (
        "target/test_start.py::test_a_start_that_is_never_reported_is_given_up_and_left_at_work"
    ),
    ("recipe/loader.py", "sparsebp study {}"): "study/test_published.py::test_a_recipes_verb_says_that_a_study_is_none",
    ("recipe/schema.py", "sparsebp resume"): (
        "worker/test_resume.py::test_a_run_that_stopped_at_a_step_goes_on_as_if_it_had_not"
    ),
}

# Texts that name a verb and advise nothing.
MENTIONS = {
    ("release/card.py", "sparsebp rerun {}"),
    ("verb/bench.py", "sparsebp policies"),
    ("cli/option.py", "sparsebp recipes"),
    ("verb/study.py", "sparsebp recipes"),
    ("verb/study.py", "sparsebp targets"),
    ("cli/run.py", "sparsebp targets"),
    ("verb/export.py", "sparsebp targets"),
    ("recipe/json_schema.py", "sparsebp policies"),
    ("recipe/schema.py", "sparsebp policies"),
    ("recipe/schema.py", "sparsebp targets"),
    ("study/schema.py", "sparsebp targets"),
    ("tracking/content.py", "sparsebp compare"),
}


@pytest.mark.inventory
def test_every_command_that_a_message_names_has_its_story() -> None:
    found = {(message.file, command) for message in MESSAGES for command in message.commands()}
    told = {key for keys in STORIES.values() for key in keys}
    assert found == told | ELSEWHERE.keys() | MENTIONS
    assert len(told) + len(ELSEWHERE) + len(MENTIONS) == len(found) > 40  # none has two


def test_a_new_message_that_names_a_command_is_noticed() -> None:
    assert Message("x.py", "all gone; `sparsebp rm {} --all` helps").commands() == ["sparsebp rm {} --all"]
    assert Message("x.py", "next: sparsebp show {}; or wait").commands() == ["sparsebp show {}"]
    assert Message("x.py", "sparsebp 0.2 made it, install sparsebp again").commands() == []


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_tests_elsewhere_exist(place: str) -> None:
    file, _, name = place.partition("::")
    assert f"def {name}(" in (ROOT / file if file.startswith("plugins/") else ROOT / "tests" / file).read_text(
        encoding="utf-8"
    )


@pytest.mark.promise("R31")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_what_a_message_advises_works_in_the_state_that_printed_it(
    reader: Reader, story: Callable[[Reader], None], record_property
) -> None:
    story(reader)
    record_property("trials", len(reader.followed))
    assert reader.followed == set(STORIES[story])
