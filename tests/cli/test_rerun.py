"""``rerun`` trains exactly again or says what differs; ``diff`` shows what two runs do not share."""

from __future__ import annotations

import io
import json
import tarfile

import pytest

from sparsebp_cli.cli.rerun import compare_losses, find_changes, prepare, read_finished
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.identity import find_code
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.run import History, JournalWriter, RunFolder, list_runs
from sparsebp_cli.run.series import Series
from sparsebp_cli.target.archive import pack

from .conftest import Cli, Write, write_run


def seal_run(run: RunFolder, **code: str) -> RunFolder:
    """Write the seal that a worker would have written, with other versions of the packages in ``code``."""
    recipe = Plan.load(run.plan_file).recipe
    seal = Seal(recipe.model_dump(mode="json"), find_code(recipe) | code, "d" * 16)
    with JournalWriter(run.path) as journal:
        journal.attempt -= 1
        journal.write("seal", values=seal.to_json())
    return run


def count_runs() -> int:
    return len(list_runs())


@pytest.fixture
def finished(write_recipe: Write) -> RunFolder:
    return seal_run(write_run(write_recipe()))


def test_a_rerun_has_the_same_plan_and_says_what_it_repeats(cli: Cli, finished: RunFolder) -> None:
    done = cli("rerun", finished.run_id)
    assert done.returncode == 0, done.stderr
    new = list_runs()[0]
    assert f"run {new.run_id} repeats {finished.run_id}" in done.stderr
    assert Plan.load(new.plan_file).recipe == Plan.load(finished.plan_file).recipe
    assert History.load(new.path).facts["repeats"] == finished.run_id
    assert "same bits" in done.stdout.splitlines()[-1]


def test_what_differs_is_listed_and_nothing_is_trained(call: Cli, write_recipe: Write) -> None:
    run = seal_run(write_run(write_recipe()), torch="1.0", sparsebp="0.0.1")
    done = call("rerun", run.run_id)
    assert (done.returncode, done.stdout) == (2, "")
    assert "code.torch" in done.stderr
    assert '"1.0"' in done.stderr
    assert f"run {run.run_id} would not be the same again: code.sparsebp, code.torch; --anyway" in done.stderr
    assert count_runs() == 1


def test_anyway_allows_other_code_and_data_and_no_other_recipe(write_recipe: Write) -> None:
    run = seal_run(write_run(write_recipe()), torch="1.0")
    new = prepare(*read_finished(run), anyway=True)
    kinds = [json.loads(line) for line in (new.path / "journal.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in kinds] == ["facts", "seal", "allow"]
    assert kinds[2]["fields"] == ["code", "data"]
    assert kinds[1]["values"]["code"]["torch"] == "1.0"


def test_a_worker_on_another_machine_gets_the_seal_to_compare_with(call: Cli, write_recipe: Write) -> None:
    run = seal_run(write_run(write_recipe()), torch="1.0")
    plan, seal = read_finished(run)
    target = plan.recipe.target.model_copy(update={"kind": "docker"})
    elsewhere = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"target": target})})
    assert find_changes(plan, seal)
    assert find_changes(elsewhere, seal) == []  # what is installed here says nothing of another machine
    new, stream = prepare(elsewhere, seal, anyway=False), io.BytesIO()
    pack(stream, new, new.run_id)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as sent:
        journal = sent.extractfile(f"{new.run_id}/journal.jsonl")
        assert journal is not None
        kinds = [json.loads(line)["kind"] for line in journal]
    assert kinds == ["facts", "seal"]


@pytest.mark.parametrize("role", ["worker", "target"])
def test_a_run_that_is_alive_is_not_repeated(call: Cli, finished: RunFolder, role: str) -> None:
    (finished.path / "journal.jsonl").write_text("")
    with finished.lock(role):
        done = call("rerun", finished.run_id)
    assert (done.returncode, count_runs()) == (101, 1)
    assert "it can be repeated once it is over" in done.stderr


def test_a_run_whose_target_does_not_answer_is_not_repeated(call: Cli, finished: RunFolder) -> None:
    finished.target_file.write_text(json.dumps({"after_attempt": 0, "sight": "working"}))
    done = call("rerun", finished.run_id)
    assert (done.returncode, count_runs()) == (101, 1)
    assert f"run {finished.run_id} is unreachable" in done.stderr


def test_a_damaged_or_unsealed_run_is_not_repeated(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    done = call("rerun", run.run_id)
    assert done.returncode == 2
    assert f"`sparsebp run --like {run.run_id}`" in done.stderr
    run.plan_file.write_text("{")
    done = call("rerun", run.run_id)
    assert (done.returncode, done.stderr.count("\n"), count_runs()) == (102, 1, 1)


def test_what_two_runs_do_not_share_is_shown_in_sections(call: Cli, write_recipe: Write) -> None:
    first = seal_run(write_run(write_recipe()))
    second = seal_run(write_run(write_recipe(), "training.learning_rate=0.25", "policy.0.keep=0.5"), torch="1.0")
    found = json.loads(call("diff", first.run_id, second.run_id, "-o", "json").stdout)
    assert found["runs"] == [first.run_id, second.run_id]
    values = {(change["section"], change["key"]): change["values"] for change in found["differences"]}
    assert values["recipe", "policy.0.keep"] == [0.1, 0.5]
    assert values["recipe", "training.learning_rate"][1] == 0.25
    assert values["code", "torch"][1] == "1.0"
    assert {section for section, _ in values} == {"recipe", "code"}
    shown = call("diff", first.run_id, second.run_id).stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("recipe") == 1


def test_results_data_and_environment_differ_by_their_values(call: Cli, write_recipe: Write) -> None:
    first, second = write_run(write_recipe()), write_run(write_recipe())
    with JournalWriter(second.path) as journal:
        journal.write("attempt", from_step=3, environment={"python": "4", "packages": {"torch": "9"}})
        journal.write("facts", values={"dataset_digest": "abc"})
        journal.write("metrics", step=4, values={"eval/loss": 1.0})
    shown = call("diff", first.run_id, second.run_id).stdout
    for word in ("environment", "packages.torch", "data", "digest", "abc", "result", "eval/loss", "interrupted"):
        assert word in shown
    assert "recipe" not in shown


def test_equal_runs_and_one_run_twice_are_told_apart(call: Cli, write_recipe: Write) -> None:
    first, second = write_run(write_recipe()), write_run(write_recipe())
    assert call("diff", first.run_id, second.run_id).stdout.startswith("nothing differs")
    done = call("diff", first.run_id, first.run_id)
    assert (done.returncode, done.stdout) == (2, "")


def test_diff_reads_a_living_run_and_refuses_a_damaged_one(call: Cli, write_recipe: Write) -> None:
    first, second = write_run(write_recipe()), write_run(write_recipe())
    with second.lock("worker"):
        assert "running" in call("diff", first.run_id, second.run_id).stdout
    second.plan_file.write_text("[]")
    done = call("diff", first.run_id, second.run_id)
    assert (done.returncode, done.stderr.count("\n")) == (102, 1)


def test_the_first_loss_that_differs_is_named(write_recipe: Write) -> None:
    first, second = (History.load(write_run(write_recipe()).path) for _ in range(2))
    assert compare_losses(first, second).text.startswith("the same bits: all ")
    whole = dict(second.metrics["eval/loss"].items())
    moment, value = whole[2]
    second.metrics["eval/loss"] = Series(whole | {2: (moment, value + 1e-12)})
    assert compare_losses(first, second).text.startswith("not the same bits: eval/loss at step 2 was ")
    del whole[2]
    second.metrics["eval/loss"] = Series(whole)
    assert compare_losses(first, second).text.startswith("not the same bits: eval/loss at step 2 was ")
