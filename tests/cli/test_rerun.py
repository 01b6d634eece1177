"""``rerun`` trains exactly again or says what differs."""

from __future__ import annotations

import io
import json
import tarfile

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.identity import find_code
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.run import History, JournalWriter, RunFolder, list_runs
from sparsebp_cli.run.series import add_together
from sparsebp_cli.target.archive import pack
from sparsebp_tools.verb.rerun import compare_losses, find_changes, prepare, read_finished

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
    assert f"run {run.run_id} cannot be repeated exactly: code.sparsebp, code.torch changed; --anyway" in done.stderr
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
    assert "only a run that has ended can be repeated" in done.stderr


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


def test_the_first_loss_that_differs_is_named(write_recipe: Write) -> None:
    first, second = (History.load(write_run(write_recipe()).path) for _ in range(2))
    assert compare_losses(first, second).text.startswith("the same bits: all ")
    whole = dict(second.metrics["eval/loss"].items())
    for last in ({"eval/loss": whole[2][1] + 1e-12}, {}):
        del second.metrics["eval/loss"]
        for step, (time, value) in whole.items():
            add_together(second.metrics, step, time, last if step == 2 else {"eval/loss": value})
        assert compare_losses(first, second).text.startswith("not the same bits: eval/loss at step 2 was ")
